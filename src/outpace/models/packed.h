// Weight matrices in GGUF's formats, and their products with rows: a panel of 16 outputs at a time.
//
// Quantized matrices are stored panel by panel. A panel has a cell for each block of 32 inputs: scales, then codes, in
// the order in which vector instructions take them (four inputs of 16 outputs are 64 consecutive codes). So a vector of
// sums has one output per lane, no sum crosses lanes, and each scale is multiplied once per 32 inputs. Rows are
// quantized to 8 bits, with a scale for each block. Sums within a block are integers; blocks are added in order. Rows
// are stored in pairs, because i8mm multiplies two at a time; for other instructions it makes no difference.
//
// Unquantized matrices, in float32 or 16 bits, stay as torch stores them, output by output (numbers.cpp).
//
// Either way a row's bits depend only on the row and the weights.

#pragma once

#include <algorithm>

#include "lanes.h"

namespace outpace {

constexpr int BLOCK = 32;            // inputs that share a scale
constexpr int GROUPS = 8;            // of four inputs
constexpr int CHUNK = 8;             // contiguous inputs of a row
constexpr int64_t TILE = 1 << 18;    // bytes of rows that stay in the L2 cache while weights stream
constexpr int MOST = 8;              // rows per pass over the weights
constexpr int64_t F32 = 0, F16 = 1, BF16 = 30;      // GGUF's numbers of unquantized types
constexpr int MOST_NUMBERS = NATIVE == 64 ? 6 : 3;  // rows per pass over unquantized weights: sums are in registers
constexpr int MOST_WOVEN = NATIVE == 64 ? 12 : 6;   // the same with woven rows
constexpr int TOGETHER = NATIVE == 64 ? 2 : 1;      // panels per pass then
constexpr int64_t WOVEN = 32;                       // from this many rows on they are woven

// A block of a pair of rows: eight codes of the first, then eight of the second, and so on.
struct alignas(64) Block {
  int8_t codes[BLOCK / CHUNK][2][CHUNK];
  float scale[2], weighed[2];        // `weighed`: scale times the sum of codes
  int32_t less[2], halves[2][2];     // the negated sum of codes: of all, and of each half
};

// How many Blocks are needed for rows of `blocks` blocks.
INLINE int64_t blocks_of(int64_t rows, int64_t blocks) { return (rows + 1) / 2 * blocks; }

// Rows in the forms that products take: numbers for unquantized matrices, blocks for others.
struct Rows {
  const float* numbers;
  const Block* blocks;
  bool woven;                        // whether the numbers are: see numbers.cpp

  int64_t panels() const { return woven ? TOGETHER : 1; }  // per pass
};

struct Weights {
  uint8_t* cells;
  const float* bias;                 // padded to whole panels; may be null
  int64_t type, outputs, inputs;     // `type`: GGUF's number

  bool quantized() const { return type != F32 && type != F16 && type != BF16; }
  int64_t panels() const { return (outputs + LANES - 1) / LANES; }
  int64_t blocks() const { return inputs / BLOCK; }

  // How many of `left` rows are taken at a time.
  int64_t pass(int64_t left, bool woven) const {
    return std::min<int64_t>(quantized() ? MOST : woven ? MOST_WOVEN : WOVEN, left);
  }

  // How many rows stay in the cache. All are taken if they are woven: weaving a panel takes as long as a few rows.
  int64_t tile(bool woven) const {
    if (woven) return INT64_MAX;
    const int64_t most = quantized() ? MOST : MOST_NUMBERS;
    const int64_t bytes = quantized() ? blocks() * int64_t(sizeof(Block)) / 2 : inputs * int64_t(sizeof(float));
    return std::max<int64_t>(1, TILE / bytes / most) * most;
  }
};

// NESTED: SPAN blocks share a scale of their scales. MIN: a minimum is added.
template <int TYPE_, int BITS_, int OFFSET_, bool MIN_, int SPAN_, int RAW_>
struct Format {
  static constexpr int TYPE = TYPE_, BITS = BITS_, OFFSET = OFFSET_, SPAN = SPAN_, RAW = RAW_;
  static constexpr bool MIN = MIN_, NESTED = SPAN > 1, WIDE = BITS == 8;
  static constexpr bool HALVES = NESTED && !MIN;                // a scale for each 16 inputs
  static constexpr int HEAD = NESTED ? LANES * 2 * (MIN ? 2 : 1) : 0;
  static constexpr int SCALES = NESTED ? LANES * 2 : LANES * 2 * (MIN ? 2 : 1);
  static constexpr int CELL = SCALES + LANES * BLOCK * BITS / 8;
  static constexpr int64_t LONG = int64_t(SPAN) * CELL + HEAD;  // bytes of SPAN cells and the scales that they share
  // The offset that is subtracted by way of `Block::less`. With several rows it is subtracted from the codes
  // themselves, if they may be negative.
  template <int ROWS>
  static constexpr int32_t SHIFT = WIDE ? MIDDLE : SIGNED && ROWS > 1 ? 0 : OFFSET;

  static int64_t bytes(int64_t blocks) { return blocks / SPAN * LONG; }
  static int64_t at(int64_t block) { return block / SPAN * LONG + HEAD + block % SPAN * CELL; }
};

using Q4_0 = Format<2, 4, 8, false, 1, 18>;
using Q4_1 = Format<3, 4, 0, true, 1, 20>;
using Q5_0 = Format<6, 5, 16, false, 1, 22>;
using Q5_1 = Format<7, 5, 0, true, 1, 24>;
using Q8_0 = Format<8, 8, 128, false, 1, 34>;
using Q4_K = Format<12, 4, 0, true, 8, 144>;
using Q5_K = Format<13, 5, 0, true, 8, 176>;
using Q6_K = Format<14, 6, 32, false, 8, 210>;

// Calls `use` with the format of this quantized type; false if there is none.
template <class Use>
INLINE bool by_format(int64_t type, Use use) {
  switch (type) {
    case Q4_0::TYPE: return use(Q4_0()), true;
    case Q4_1::TYPE: return use(Q4_1()), true;
    case Q5_0::TYPE: return use(Q5_0()), true;
    case Q5_1::TYPE: return use(Q5_1()), true;
    case Q8_0::TYPE: return use(Q8_0()), true;
    case Q4_K::TYPE: return use(Q4_K()), true;
    case Q5_K::TYPE: return use(Q5_K()), true;
    case Q6_K::TYPE: return use(Q6_K()), true;
    default: return false;
  }
}

// One register of codes per group of a cell; `from` points to those of the register's first lane. The low four bits of
// group g are in vector g % 4, in the lower or upper halves of bytes; a fifth bit is bit g of one more vector, a fifth
// and sixth are bits of two more.
template <class F>
INLINE void unpack(const uint8_t* from, BytePart (&codes)[GROUPS]) {
  if constexpr (F::WIDE) {
    for (int group = 0; group < GROUPS; group++) codes[group] = load<BytePart>(from + 64 * group);
    return;
  }
  typedef uint16_t Shorts __attribute__((vector_size(NATIVE)));  // x86 cannot shift bytes
  for (int group = 0; group < 4; group++) {
    const Shorts both = load<Shorts>(from + 64 * group);
    codes[group] = (BytePart)(both & 0x0f0f);
    codes[group + 4] = load<BytePart>(from + 64 * group) >> 4;
  }
  if constexpr (F::BITS == 5) {
    const Shorts bits = load<Shorts>(from + 256);
    for (int group = 0; group < GROUPS; group++) {
      const Shorts moved = group < 4 ? bits << (4 - group) : bits >> (group - 4);
      codes[group] |= (BytePart)(moved & 0x1010);
    }
  } else if constexpr (F::BITS == 6) {
    for (int group = 0; group < GROUPS; group++) {
      const Shorts bits = load<Shorts>(from + 256 + 64 * (group / 4));
      const int place = 2 * (group % 4);
      const Shorts moved = place < 4 ? bits << (4 - place) : bits >> (place - 4);
      codes[group] |= (BytePart)(moved & 0x3030);
    }
  }
}

// A panel's scales for the lanes of one register, cell by cell.
template <class F>
struct Scales {
  FloatPart outer, outer_least;       // of nested formats
  FloatPart first, second, least;     // `second`: of the second half, if halves have scales of their own

  // Read what SPAN cells share, in nested formats.
  INLINE void head(const uint8_t* cell, int lane) {
    if constexpr (F::NESTED) {
      outer = from_halves(cell + 2 * lane);
      if constexpr (F::MIN) outer_least = from_halves(cell + 2 * (LANES + lane));
    }
  }
  INLINE void read(const uint8_t* cell, int lane) {
    if constexpr (F::HALVES) {
      first = outer * from_bytes<int8_t>(cell + lane);
      second = outer * from_bytes<int8_t>(cell + LANES + lane);
    } else if constexpr (F::NESTED) {
      first = outer * from_bytes<uint8_t>(cell + lane);
      least = outer_least * from_bytes<uint8_t>(cell + LANES + lane);  // already negated in the head
    } else {
      first = from_halves(cell + 2 * lane);
      if constexpr (F::MIN) least = from_halves(cell + 2 * (LANES + lane));
    }
  }
};

// Bytes of a number of an unquantized type; 0 for other types.
INLINE int64_t size_of(int64_t type) { return type == F32 ? 4 : type == F16 || type == BF16 ? 2 : 0; }

// The weights of one output of an unquantized matrix, times `scale`.
void read_numbers(const Weights& weights, int64_t output, float scale, float* to);

// Weave up to MOST_WOVEN rows; `to` has room for as many.
void weave(const float* rows, int64_t count, int64_t inputs, float* to);

// TOGETHER panels of an unquantized matrix, woven; valid until the thread's next call.
const Floats* woven_panels(const Weights& weights, int64_t panel);

// Products with `count` rows, at most `weights.pass(count)`, without the bias: of a panel, or of TOGETHER woven ones.
void multiply_blocks(const Weights& weights, int64_t panel, const Block* x, int64_t count, Floats* sums);
void multiply_numbers(const Weights& weights, int64_t panel, const float* x, int64_t count, Floats* sums);
void multiply_woven(const Floats* panels, int64_t inputs, const float* x, int64_t count, Floats* sums);

// The products of `x.panels()` panels and rows `first` to `last`, passed to `sink(row, panel, sums)`.
template <class Sink>
INLINE void with_panels(const Weights& weights, int64_t panel, const Rows& x, int64_t first, int64_t last,
                        Sink&& sink) {
  constexpr int LARGEST = std::max({MOST, MOST_WOVEN * TOGETHER, int(WOVEN)});
  Floats sums[LARGEST];
  const int64_t some = x.panels(), stop = std::min(weights.panels(), panel + some);
  const Floats* woven = x.woven ? woven_panels(weights, panel) : nullptr;
  for (int64_t row = first, count; row < last; row += count) {
    count = weights.pass(last - row, x.woven);
    const float* numbers = x.numbers + row * weights.inputs;
    if (woven) {
      multiply_woven(woven, weights.inputs, numbers, count, sums);
    } else if (weights.quantized()) {
      multiply_blocks(weights, panel, x.blocks + blocks_of(row, weights.blocks()), count, sums);
    } else {
      multiply_numbers(weights, panel, numbers, count, sums);
    }
    for (int64_t m = 0; m < count; m++) {
      for (int64_t one = panel; one < stop; one++) {
        const Floats& found = sums[m * some + one - panel];
        sink(row + m, one, weights.bias ? found + load<Floats>(weights.bias + one * LANES) : found);
      }
    }
  }
}

// Quantize 32 values of a row to 8 bits.
INLINE void round_block(const float* from, Block& to, int64_t row) {
  const int64_t side = row % 2;
  const Floats parts[2] = {load<Floats>(from), load<Floats>(from + LANES)};
  // Compared as integers, so that NaN is the largest and makes the scale NaN.
  const int32_t bits = highest(larger(as<Ints>(parts[0]) & 0x7fffffff, as<Ints>(parts[1]) & 0x7fffffff));
  float most;
  std::memcpy(&most, &bits, sizeof most);
  const float by = most > 1e-36f ? 127.0f / most : 0.0f;  // of smaller numbers it would be infinite
  int32_t sums[2];
  for (int half = 0; half < 2; half++) {
    const Floats magic = splat(12582912.0f);
    int32_t codes[LANES];
    store(codes, as<Ints>(parts[half] * by + magic) - as<Ints>(magic));  // to the nearest, ties to even
    sums[half] = 0;
    for (int lane = 0; lane < LANES; lane++) {
      const int8_t code = int8_t(codes[lane]);  // of NaN, codes are large
      to.codes[2 * half + lane / CHUNK][side][lane % CHUNK] = code;
      sums[half] += code;
    }
  }
  to.scale[side] = most / 127.0f;
  to.weighed[side] = to.scale[side] * float(sums[0] + sums[1]);
  to.less[side] = -(sums[0] + sums[1]);
  for (int half = 0; half < 2; half++) to.halves[half][side] = -sums[half];
}

// Quantize row `number`.
INLINE void round_row(const float* from, int64_t blocks, Block* x, int64_t number) {
  for (int64_t block = 0; block < blocks; block++)
    round_block(from + block * BLOCK, x[number / 2 * blocks + block], number);
}

}  // namespace outpace
