// Matrices in GGUF's formats: filling them from a file's rows, reading rows as floats, and products. See packed.h.

#include "packed.h"

#include "team.h"

namespace outpace {
namespace {

constexpr int64_t GRAIN = 1 << 16;  // the fewest multiplications per share

INLINE FloatPart to_floats(const IntPart& values) { return __builtin_convertvector(values, FloatPart); }

// Call `use` with each number below COUNT, as a compile-time constant.
template <int COUNT, class Use>
INLINE void each(Use use) {
  [&]<int... numbers>(std::integer_sequence<int, numbers...>) ALWAYS {
    (use(std::integral_constant<int, numbers>()), ...);
  }(std::make_integer_sequence<int, COUNT>());
}

// Add COUNT halves of a block, from FIRST on, to the sums of ROWS rows: one row of a pair, or whole pairs.
template <class F, int SIDE, int FIRST, int COUNT, int ROWS>
INLINE void add_halves(IntPart (&sums)[ROWS], const BytePart (&codes)[GROUPS], const Block* const* x) {
  if constexpr (ROWS == 1) {
    each<4 * COUNT>([&](auto number) ALWAYS {
      constexpr int group = 4 * FIRST + number;
      sums[0] = dot<F::WIDE, 2 * SIDE + group % 2>(sums[0], codes[group], Inputs(x[0]->codes[group / 2][0]));
    });
  } else if constexpr (SQUARES) {
    each<COUNT * ROWS>([&](auto number) ALWAYS {
      constexpr int chunk = 2 * FIRST + number / (ROWS / 2), row = number % (ROWS / 2) * 2;
      const Inputs inputs(x[row / 2]->codes[chunk][0]);
      for (int part = 0; part < 2; part++) sums[row + part] = square(sums[row + part], codes[2 * chunk + part], inputs);
    });
  } else {
    each<COUNT>([&](auto half) ALWAYS {
      constexpr int chunk = 2 * (FIRST + half);
      add_four(sums, codes + 2 * chunk, x[0]->codes[chunk][0], x[1]->codes[chunk][0]);
    });
  }
}

// Add a block to the sums of ROWS of M rows; the first is on SIDE of its pair.
template <class F, int M, int SIDE, int ROWS>
INLINE void add_block(FloatPart (&sums)[ROWS], const BytePart (&codes)[GROUPS], const Scales<F>& scales,
                      const Block* const* x) {
  constexpr int PARTS = F::HALVES ? 2 : 1;  // each with its own scale
  each<PARTS>([&](auto part) ALWAYS {
    IntPart found[ROWS];
    each<ROWS>([&](auto row) ALWAYS {
      constexpr int pair = row / 2, side = SIDE + row % 2;
      constexpr int32_t shift = F::template SHIFT<M>;
      const int32_t less = F::HALVES ? x[pair]->halves[part][side] : x[pair]->less[side];
      found[row] = shift ? filled<IntPart>(less * shift) : nothing();
    });
    add_halves<F, SIDE, part, 2 / PARTS>(found, codes, x);
    each<ROWS>([&](auto row) ALWAYS {
      constexpr int pair = row / 2, side = SIDE + row % 2;
      if constexpr (ROWS > 1 && side == 0) to_rows(found[row], found[row + 1]);
      const FloatPart scale = (part ? scales.second : scales.first) * x[pair]->scale[side];
      sums[row] = fused(to_floats(found[row]), scale, sums[row]);
      if constexpr (F::MIN) sums[row] = fused(scales.least, filled<FloatPart>(x[pair]->weighed[side]), sums[row]);
    });
  });
}

// A panel's products with M rows; those from `count` on are not stored. Each register of outputs is computed over all
// cells before the next: few accumulators, so none is spilled, and the panel stays in the L1 cache. Meanwhile the next
// panel is prefetched.
template <class F, int M>
void multiply(const uint8_t* cells, int64_t blocks, const Block* x, int64_t count, Floats* to) {
  constexpr int ROWS = M > 1 && SQUARES ? std::min(M, 4) : M >= 4 && FOURS ? 4 : 1;  // at a time
  constexpr int LINE = 64, PARTS = LANES / PART;
  const int64_t ahead = F::bytes(blocks);
  for (int lane = 0; lane < LANES; lane += PART) {
    const uint8_t* cell = cells;
    const Block* pairs[(M + 1) / 2];
    for (int pair = 0; pair < (M + 1) / 2; pair++) pairs[pair] = x + std::min<int64_t>(pair, (count - 1) / 2) * blocks;
    Scales<F> scales = {};
    FloatPart sums[M / ROWS][ROWS] = {};
    for (int64_t block = 0; block < blocks; block++) {
      if (F::NESTED && block % F::SPAN == 0) {
        scales.head(cell, lane);
        cell += F::HEAD;
      }
      for (int at = lane / PART * LINE; at < F::CELL; at += PARTS * LINE) __builtin_prefetch(cell + ahead + at);
      scales.read(cell, lane);
      BytePart codes[GROUPS];
      unpack<F>(cell + F::SCALES + 4 * lane, codes);
      if constexpr (F::template SHIFT<1> != F::template SHIFT<M>)
        for (BytePart& code : codes) code -= F::OFFSET;
      if constexpr (ROWS > 1)
        for (int group = 0; group < GROUPS; group += 2) to_squares(codes[group], codes[group + 1]);
      cell += F::CELL;
      each<M / ROWS>([&](auto time) ALWAYS {
        constexpr int row = time * ROWS;
        add_block<F, M, row % 2>(sums[time], codes, scales, pairs + row / 2);
      });
      for (const Block*& pair : pairs) pair++;
    }
    each<M>([&](auto m) ALWAYS {
      const FloatPart all = sums[m / ROWS][m % ROWS];
      if (m < count) store(reinterpret_cast<float*>(to + m) + lane, all);
    });
  }
}

// One block of a row in GGUF's form.
template <class F>
struct Raw {
  const uint8_t* at;  // SPAN blocks
  int64_t block;      // which of them

  const uint8_t* scale() const { return F::TYPE == Q6_K::TYPE ? at + 208 : at; }
  const uint8_t* least() const { return at + 2; }  // of formats with a minimum

  uint8_t code(int place) const {
    if constexpr (F::WIDE) return at[2 + place] ^ MIDDLE;
    if constexpr (F::HALVES) {
      const uint8_t *low = at + block / 4 * 64 + block % 2 * 32, *high = at + 128 + block / 4 * 32;
      const int quarter = block % 4;
      return (low[place] >> (quarter / 2 * 4) & 15) | (high[place] >> (2 * quarter) & 3) << 4;
    } else if constexpr (F::NESTED) {
      const int bits = F::BITS == 5 ? 32 : 0;  // the fifth bits of all inputs come first
      const uint8_t low = at[16 + bits + block / 2 * 32 + place] >> (block % 2 * 4) & 15;
      return bits ? low | (at[16 + place] >> block & 1) << 4 : low;
    } else {
      const uint8_t* codes = at + (F::MIN ? 4 : 2);
      const uint8_t* bits = codes;
      if (F::BITS == 5) codes += 4;
      const uint8_t low = codes[place % 16] >> (place / 16 * 4) & 15;
      return F::BITS == 5 ? low | (bits[place / 8] >> (place % 8) & 1) << 4 : low;
    }
  }

  // The two bytes of nested formats: scale and minimum, or the scales of two halves.
  uint8_t inner(int which) const {
    if constexpr (F::HALVES) return at[192 + block / 4 * 8 + block % 4 * 2 + which];
    const uint8_t* six = at + 4;
    if (block < 4) return six[block + 4 * which] & 63;
    const uint8_t high = six[block - 4 + 4 * which] >> 6;
    return (six[block + 4] >> (4 * which) & 15) | high << 4;
  }
};

void put(uint8_t* codes, int lane, int place, uint8_t code, int bits) {
  const int group = place / 4, byte = 4 * lane + place % 4;
  if (bits == 8) {
    codes[64 * group + byte] = code;
    return;
  }
  codes[64 * (group % 4) + byte] |= (code & 15) << (group / 4 * 4);
  if (bits == 5) codes[256 + byte] |= (code >> 4) << group;
  if (bits == 6) codes[256 + 64 * (group / 4) + byte] |= (code >> 4) << (2 * (group % 4));
}

template <class F>
void fill_row(uint8_t* panel, int lane, int64_t blocks, const uint8_t* raw) {
  for (int64_t block = 0; block < blocks; block++) {
    const Raw<F> from{raw + block / F::SPAN * F::RAW, block % F::SPAN};
    uint8_t* cell = panel + F::at(block);
    uint8_t* head = F::NESTED ? panel + block / F::SPAN * F::LONG : cell;
    std::memcpy(head + 2 * lane, from.scale(), 2);
    if (F::MIN) std::memcpy(head + 2 * LANES + 2 * lane, from.least(), 2);
    if (F::NESTED) {
      if (F::MIN) head[2 * LANES + 2 * lane + 1] ^= 0x80;  // GGUF subtracts the minimum; here it is added
      for (int which = 0; which < 2; which++) cell[LANES * which + lane] = from.inner(which);
    }
    for (int place = 0; place < BLOCK; place++) put(cell + F::SCALES, lane, place, from.code(place), F::BITS);
  }
}

template <class F>
void read_row(const uint8_t* panel, int lane, int64_t blocks, float* to) {
  const int first = lane / PART * PART, at = lane % PART;  // the lane's register, and its index there
  Scales<F> scales = {};
  for (int64_t block = 0; block < blocks; block++, to += BLOCK) {
    const uint8_t* cell = panel + F::at(block);
    scales.head(panel + block / F::SPAN * F::LONG, first);
    scales.read(cell, first);
    BytePart codes[GROUPS];
    unpack<F>(cell + F::SCALES + 4 * first, codes);
    for (int place = 0; place < BLOCK; place++) {
      const uint8_t stored = codes[place / 4][4 * at + place % 4];
      const int code = F::WIDE && !MIDDLE ? int(int8_t(stored)) : int(stored) - F::OFFSET;
      const float scale = F::HALVES && place >= BLOCK / 2 ? scales.second[at] : scales.first[at];
      to[place] = scale * float(code) + (F::MIN ? scales.least[at] : 0.0f);
    }
  }
}

}  // namespace

void multiply_blocks(const Weights& weights, int64_t panel, const Block* x, int64_t count, Floats* sums) {
  const int64_t blocks = weights.blocks();
  by_format(weights.type, [&](auto format) {
    using F = decltype(format);
    const uint8_t* cells = weights.cells + panel * F::bytes(blocks);
    if (count == 1) return multiply<F, 1>(cells, blocks, x, count, sums);
    if (count == 2) return multiply<F, 2>(cells, blocks, x, count, sums);
    if (count <= 4) return multiply<F, 4>(cells, blocks, x, count, sums);
    multiply<F, MOST>(cells, blocks, x, count, sums);
  });
}

}  // namespace outpace

using namespace outpace;

extern "C" {

#pragma GCC visibility push(default)

// The size of a matrix in bytes; 0 for unsupported types and sizes.
int64_t packed_bytes(int64_t type, int64_t outputs, int64_t inputs) {
  int64_t bytes = 0;
  if (const int64_t size = size_of(type)) return inputs % LANES == 0 ? outputs * inputs * size : 0;
  by_format(type, [&](auto format) {
    using F = decltype(format);
    if (inputs % (BLOCK * F::SPAN) == 0) bytes = (outputs + LANES - 1) / LANES * F::bytes(inputs / BLOCK);
  });
  return bytes;
}

// Fill a zeroed matrix from GGUF's rows: output n is row order[n], or row n without an order.
void packed_fill(const Weights* weights, const uint8_t* raw, const int64_t* order, int threads) {
  const int64_t blocks = weights->blocks(), line = weights->inputs * size_of(weights->type);
  Team::Turn team(threads);
  team->each(weights->outputs, 4 * LANES, [&](int64_t first, int64_t last) {
    if (line)
      for (int64_t output = first; output < last; output++)
        std::memcpy(weights->cells + output * line, raw + (order ? order[output] : output) * line, line);
    by_format(weights->type, [&](auto format) {
      using F = decltype(format);
      for (int64_t output = first; output < last; output++)
        fill_row<F>(weights->cells + output / LANES * F::bytes(blocks), output % LANES, blocks,
                    raw + (order ? order[output] : output) * (blocks / F::SPAN * F::RAW));
    });
  });
}

// The weights of some outputs as floats, times `scale`.
void packed_rows(const Weights* weights, const int64_t* outputs, int64_t count, float scale, float* to) {
  const int64_t blocks = weights->blocks();
  if (!weights->quantized())
    for (int64_t row = 0; row < count; row++) read_numbers(*weights, outputs[row], scale, to + row * weights->inputs);
  by_format(weights->type, [&](auto format) {
    using F = decltype(format);
    for (int64_t row = 0; row < count; row++) {
      float* values = to + row * weights->inputs;
      read_row<F>(weights->cells + outputs[row] / LANES * F::bytes(blocks), outputs[row] % LANES, blocks, values);
      for (int64_t place = 0; place < weights->inputs; place++) values[place] *= scale;
    }
  });
}

// [count, outputs] from rows [count, inputs].
void packed_linear(const Weights* weights, const float* rows, int64_t count, float* out, int threads) {
  const int64_t blocks = weights->blocks(), inputs = weights->inputs, outputs = weights->outputs;
  const bool woven = !weights->quantized() && count >= WOVEN;
  const int64_t tile = weights->tile(woven);
  std::unique_ptr<Block[]> rounded;
  std::unique_ptr<float[]> copies;
  Team::Turn team(threads);
  if (weights->quantized()) {
    rounded = std::make_unique<Block[]>(blocks_of(count, blocks));
    team->each(count, 16, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; row++) round_row(rows + row * inputs, blocks, rounded.get(), row);
    });
  } else if (woven) {
    const int64_t groups = (count + MOST_WOVEN - 1) / MOST_WOVEN;
    copies.reset(new float[groups * MOST_WOVEN * inputs]);
    team->each(groups, 1, [&](int64_t first, int64_t last) {
      for (int64_t row = first * MOST_WOVEN; row < std::min(count, last * MOST_WOVEN); row += MOST_WOVEN)
        weave(rows + row * inputs, std::min<int64_t>(MOST_WOVEN, count - row), inputs, copies.get() + row * inputs);
    });
  }
  const Rows x{woven ? copies.get() : rows, rounded.get(), woven};
  const int64_t some = x.panels(), passes = (weights->panels() + some - 1) / some;
  const int64_t grain = 1 + GRAIN / (some * LANES * inputs * std::min<int64_t>(count, MOST));
  team->each(passes, grain, [&](int64_t begin, int64_t end) {
    for (int64_t first = 0; first < count; first += tile)
      for (int64_t pass = begin; pass < end; pass++)
        with_panels(*weights, pass * some, x, first, std::min(count, first + tile),
                    [&](int64_t row, int64_t panel, const Floats& sums) {
                      const int64_t width = std::min<int64_t>(LANES, outputs - panel * LANES);
                      std::memcpy(out + row * outputs + panel * LANES, &sums, width * sizeof(float));
                    });
  });
}

#pragma GCC visibility pop

}  // extern "C"
