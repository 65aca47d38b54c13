// Products of rows and unquantized matrices, which stay as torch stores them: output by output, in float32 or 16 bits.
//
// A product of a row and an output always has the same order of summation: a sum for each of 16 lanes, over the inputs
// in order, and then the lanes, as `total` adds them. There are two ways to compute it:
//
// - A few rows: weights are read in place, and each once for several rows. Memory bandwidth is the limit, so a few rows
//   cost little more than one.
// - Many rows: arithmetic is the limit, so no sum may cross lanes. Panels of weights and rows are woven: inputs are in
//   the order of their lanes (0, 16, 32, ..., 8, 24, ...), and for each the outputs of a panel, or MOST_WOVEN rows, are
//   neighbours. Lanes that `total` adds first follow each other, so that few sums are ever set aside.

#include <vector>

#include "packed.h"

namespace outpace {
namespace {

constexpr int OUTPUTS = NATIVE == 64 ? 4 : 2;  // at a time: their sums with MOST_NUMBERS rows fit into the registers
constexpr int PARTS = LANES / PART;

struct Half {
  uint8_t bytes[2];
};
struct Brain {  // bfloat16: the first half of a float32
  uint8_t bytes[2];
};

INLINE FloatPart read(const float* from) { return load<FloatPart>(from); }
INLINE FloatPart read(const Half* from) { return from_halves(from->bytes); }
INLINE FloatPart read(const Brain* from) { return from_brains(from->bytes); }

template <class Use>
INLINE void by_number(int64_t type, Use use) {
  if (type == F32) return use(float());
  if (type == F16) return use(Half());
  use(Brain());
}

// The products of these outputs and M rows, OUTPUTS at a time. Those that follow are prefetched from byte `skip` on,
// `step` bytes of each for LANES inputs, so that memory is busy in every pass over the weights that are here.
// With SEVERAL passes arithmetic is the limit, and loads must be few. Not inlined: constants of what follows the inner
// loop would take registers in it.
template <class Number, int M, bool SEVERAL>
__attribute__((noinline)) void multiply(const Number* const* outputs, int count, int64_t inputs, const float* x,
                                        int64_t skip, int64_t step, float* sums) {
  for (int first = 0; first < count; first += OUTPUTS, outputs += OUTPUTS) {
    const Number* from[OUTPUTS];
    const char* next[OUTPUTS];
    UNROLL for (int n = 0; n < OUTPUTS; n++) {
      from[n] = outputs[n];
      next[n] = reinterpret_cast<const char*>(outputs[OUTPUTS + n]) + skip;
    }
    FloatPart found[PARTS][OUTPUTS][M] = {};
    for (int64_t k = 0; k < inputs; k += LANES) {
      UNROLL for (int n = 0; n < OUTPUTS; n++) {
        __builtin_prefetch(next[n]);
        next[n] += step;
      }
      const float* values = x + k;
      if constexpr (std::is_same_v<Number, Brain> && NATIVE == 32) {  // output by output: there are only 16 registers
        UNROLL for (int n = 0; n < OUTPUTS; n++) {
          const Brains numbers(from[n][k].bytes);
          UNROLL for (int part = 0; part < PARTS; part++) {
            const FloatPart factor = numbers.part(part);
            UNROLL for (int m = 0; m < M; m++) {
              FloatPart& sum = found[part][n][m];
              sum = fused(factor, load<FloatPart>(values + m * inputs + part * PART), sum);
            }
          }
        }
      } else {
        UNROLL for (int part = 0; part < PARTS; part++) {
          FloatPart factors[OUTPUTS];
          UNROLL for (int n = 0; n < OUTPUTS; n++) factors[n] = held<SEVERAL>(read(from[n] + k + part * PART));
          UNROLL for (int m = 0; m < M; m++) {
            const FloatPart value = held<true>(load<FloatPart>(values + m * inputs + part * PART));
            UNROLL for (int n = 0; n < OUTPUTS; n++) found[part][n][m] = fused(factors[n], value, found[part][n][m]);
          }
        }
      }
    }
    UNROLL for (int m = 0; m < M; m++) {
      UNROLL for (int n = 0; n < OUTPUTS; n++) {
        FloatPart lanes[PARTS];
        UNROLL for (int part = 0; part < PARTS; part++) lanes[part] = found[part][n][m];
        sums[m * LANES + first + n] = total(load<Floats>(lanes));
      }
    }
  }
}

// The place of a lane in woven inputs: its bits in reverse.
constexpr int place(int lane) { return (lane & 1) << 3 | (lane & 2) << 1 | (lane & 4) >> 1 | lane >> 3; }

// The products of the first M of MOST_WOVEN woven rows and TOGETHER woven panels.
template <int M>
void multiply_woven(const Floats* panels, int64_t inputs, const float* x, Floats* sums) {
  constexpr int ALL = PARTS * TOGETHER, LEVELS = 4;
  static_assert(LANES == 1 << LEVELS);
  const int64_t each = inputs / LANES;
  FloatPart kept[LEVELS + 1][M][ALL];  // sums of 1, 2, 4, 8 and 16 lanes
  const float *factors = reinterpret_cast<const float*>(panels), *values = x;
  for (int lane = 0; lane < LANES; lane++) {
    FloatPart found[M][ALL] = {};
    for (int64_t k = 0; k < each; k++, factors += ALL * PART, values += MOST_WOVEN) {
      FloatPart factor[ALL];
      UNROLL for (int part = 0; part < ALL; part++) factor[part] = load<FloatPart>(factors + part * PART);
      UNROLL for (int m = 0; m < M; m++) {
        const FloatPart value = filled<FloatPart>(values[m]);
        UNROLL for (int part = 0; part < ALL; part++) found[m][part] = fused(factor[part], value, found[m][part]);
      }
    }
    int level = 0;
    for (; lane >> level & 1; level++)
      UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int part = 0; part < ALL; part++) found[m][part] = kept[level][m][part] + found[m][part];
    UNROLL for (int m = 0; m < M; m++)
      UNROLL for (int part = 0; part < ALL; part++) kept[level][m][part] = found[m][part];
  }
  std::memcpy(sums, kept[LEVELS], sizeof(kept[LEVELS]));
}

// Call `use` with `count`, 1 to MOST, as a compile-time constant.
template <int MOST, class Use>
INLINE void by_count(int64_t count, Use use) {
  if constexpr (MOST > 1) {
    if (count < MOST) return by_count<MOST - 1>(count, use);
  }
  use(std::integral_constant<int, MOST>());
}

}  // namespace

void weave(const float* rows, int64_t count, int64_t inputs, float* to) {
  const int64_t each = inputs / LANES;
  for (int64_t k = 0; k < each; k++)
    for (int lane = 0; lane < LANES; lane++)
      for (int64_t m = 0; m < count; m++)
        to[(place(lane) * each + k) * MOST_WOVEN + m] = rows[m * inputs + k * LANES + lane];
}

const Floats* woven_panels(const Weights& weights, int64_t panel) {
  static thread_local std::vector<Floats> woven;
  const int64_t inputs = weights.inputs, each = inputs / LANES, last = weights.outputs - 1;
  if (int64_t(woven.size()) < inputs * TOGETHER) woven.resize(inputs * TOGETHER);
  float* to = reinterpret_cast<float*>(woven.data());
  by_number(weights.type, [&](auto number) {
    const auto* all = reinterpret_cast<const decltype(number)*>(weights.cells);
    for (int64_t k = 0; k < inputs; k += PART) {
      for (int first = 0; first < LANES * TOGETHER; first += PART) {
        FloatPart rows[PART];
        UNROLL for (int n = 0; n < PART; n++)
          rows[n] = read(all + std::min(last, panel * LANES + first + n) * inputs + k);
        transpose(rows);
        UNROLL for (int n = 0; n < PART; n++)
          store(to + (place((k + n) % LANES) * each + (k + n) / LANES) * LANES * TOGETHER + first, rows[n]);
      }
    }
  });
  return woven.data();
}

void multiply_numbers(const Weights& weights, int64_t panel, const float* x, int64_t count, Floats* sums) {
  by_number(weights.type, [&](auto number) {
    using Number = decltype(number);
    const int64_t inputs = weights.inputs, last = weights.outputs - 1, line = inputs * sizeof(Number);
    const int64_t passes = (count + MOST_NUMBERS - 1) / MOST_NUMBERS;
    const Number* from[LANES + OUTPUTS];  // of the panel and what follows; beyond the matrix the last output again
    for (int n = 0; n < LANES + OUTPUTS; n++)
      from[n] = reinterpret_cast<const Number*>(weights.cells) + std::min(last, panel * LANES + n) * inputs;
    const int some = passes == 1 ? LANES : OUTPUTS;  // outputs that stay in the L1 cache for all passes
    for (int first = 0; first < LANES; first += some) {
      for (int64_t pass = 0, row = 0, rows; pass < passes; pass++, row += rows) {
        rows = (count - row + passes - pass - 1) / (passes - pass);  // passes of about the same size
        by_count<MOST_NUMBERS>(rows, [&](auto m) {
          const auto multiply_some = passes == 1 ? multiply<Number, m, false> : multiply<Number, m, true>;
          multiply_some(from + first, some, inputs, x + row * inputs, pass * line / passes,
                        LANES * sizeof(Number) / passes, reinterpret_cast<float*>(sums + row) + first);
        });
      }
    }
  });
}

void multiply_woven(const Floats* panels, int64_t inputs, const float* x, int64_t count, Floats* sums) {
  by_count<MOST_WOVEN>(count, [&](auto m) { multiply_woven<m>(panels, inputs, x, sums); });
}

void read_numbers(const Weights& weights, int64_t output, float scale, float* to) {
  by_number(weights.type, [&](auto number) {
    const auto* from = reinterpret_cast<const decltype(number)*>(weights.cells) + output * weights.inputs;
    for (int64_t at = 0; at < weights.inputs; at += PART) store(to + at, read(from + at) * scale);
  });
}

}  // namespace outpace
