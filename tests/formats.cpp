// The products of random matrices of all formats with 1 to 16 rows, or 40, and the matrices as numbers, to standard
// output: the same bits on every processor that has a fused multiply-add.
#include <cstdio>
#include <vector>

#include "packed.h"

using namespace outpace;

extern "C" {
int64_t packed_bytes(int64_t, int64_t, int64_t);
void packed_fill(const Weights*, const uint8_t*, const int64_t*, int);
void packed_rows(const Weights*, const int64_t*, int64_t, float, float*);
void packed_linear(const Weights*, const float*, int64_t, float*, int);
}

constexpr int64_t INPUTS = 512, OUTPUTS = 37, ROWS = 16;

uint32_t drawn = 1;
uint32_t draw() { return (drawn = drawn * 1664525 + 1013904223) >> 8; }

void put(const std::vector<float>& numbers) { std::fwrite(numbers.data(), sizeof(float), numbers.size(), stdout); }

// Of an unquantized type.
void check_numbers(int64_t type) {
  std::vector<uint8_t> cells(packed_bytes(type, OUTPUTS, INPUTS));
  const int size = cells.size() / (OUTPUTS * INPUTS);
  for (size_t at = 0; at < cells.size(); at++)  // around 1
    cells[at] = at % size == size_t(size) - 1 ? 0x3c | (draw() & 0x80) : draw();
  const Weights weights{cells.data(), nullptr, type, OUTPUTS, INPUTS};
  std::vector<float> rows(40 * INPUTS);
  for (float& number : rows) number = (float(draw()) - (1 << 23)) * 1e-7f;
  for (int64_t count : {1, 2, 3, 5, 7, 16, 40}) {
    std::vector<float> found(count * OUTPUTS);
    packed_linear(&weights, rows.data(), count, found.data(), 1);
    put(found);
  }
}

template <class F>
void check(F) {
  std::vector<uint8_t> raw(OUTPUTS * INPUTS / BLOCK / F::SPAN * F::RAW);
  for (uint8_t& byte : raw) byte = draw();
  for (size_t at = 0; at < raw.size(); at += F::RAW) {  // scales of a sensible size: numbers of 16 bits around 0.01
    uint8_t* scales = &raw[F::HALVES ? at + 208 : at];
    scales[1] = 0x20 | (draw() & 3);
    if (F::MIN) scales[3] = 0xa0 | (draw() & 3);
  }
  std::vector<uint8_t> cells(packed_bytes(F::TYPE, OUTPUTS, INPUTS));
  const Weights weights{cells.data(), nullptr, F::TYPE, OUTPUTS, INPUTS};
  packed_fill(&weights, raw.data(), nullptr, 1);
  std::vector<float> numbers(OUTPUTS * INPUTS);
  std::vector<int64_t> all(OUTPUTS);
  for (int64_t output = 0; output < OUTPUTS; output++) all[output] = output;
  packed_rows(&weights, all.data(), OUTPUTS, 1.0f, numbers.data());
  put(numbers);
  std::vector<float> rows(ROWS * INPUTS);
  for (float& number : rows) number = (float(draw()) - (1 << 23)) * 1e-7f;
  for (int64_t count = 1; count <= ROWS; count++) {
    std::vector<float> found(count * OUTPUTS);
    packed_linear(&weights, rows.data(), count, found.data(), 1);
    put(found);
  }
}

int main() {
  for (int64_t type : {F32, F16, BF16}) check_numbers(type);
  for (int64_t type = 0; type < 16; type++) by_format(type, [](auto format) { check(format); });
}
