// Exact mode on a CPU, besides matrix products: attention, means and elementwise functions, in float32.
//
// A row attends to its slots in the order of positions. The order of summation depends only on how many there are, so a
// row has the same bits in any tree, batch and prefill chunk, and in any slots.
//
// torch computes most of an array with vector code and the remainder with scalar code, which rounds differently; the
// remainder depends on the number of rows and threads. Here the same code computes every element.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "vectors.h"

namespace {

using torch::stable::Tensor;

constexpr int SUMS = 4, STEP = SUMS * WIDTH;  // accumulators of a score
constexpr int BLOCK = 64 / WIDTH;             // vectors of values that are accumulated together
constexpr int64_t GRAIN = 1 << 15;            // the fewest multiplications per thread
constexpr int64_t FEW = 1 << 11;              // the fewest elements per thread

// Addresses of keys or values by head and slot.
struct Stored {
  const float* first;
  int64_t head, slot;

  explicit Stored(const Tensor& from)
      : first(from.const_data_ptr<float>()), head(from.stride(1)), slot(from.stride(2)) {}
  const float* of(int64_t which) const { return first + which * head; }
};

struct Attention {
  const Stored query, keys, values;   // a query has rows instead of slots
  float* out;                         // [rows, heads, size]
  const int64_t heads, groups, size;  // `groups` query heads share a key head
  const int64_t *text, *first, *past, *positions, *tails;
  const int64_t depth, window;
  const float scaling, softcap;

  // The slots that a row attends to, in the order of positions.
  void list(int64_t row, std::vector<int64_t>& slots) const {
    const int64_t stop = positions[row] + 1, start = window ? std::max<int64_t>(0, stop - window) : 0;
    slots.clear();
    for (int64_t place = start; place < stop; place++)
      slots.push_back(place < past[row] ? text[first[row] + place] : tails[row * depth + place - past[row]]);
  }

  float score(const float* asked, const float* key) const {
    Vector sums[SUMS] = {};
    int64_t place = 0;
    for (; place + STEP <= size; place += STEP)
      for (int sum = 0; sum < SUMS; sum++)
        sums[sum] += load(asked + place + sum * WIDTH) * load(key + place + sum * WIDTH);
    for (; place + WIDTH <= size; place += WIDTH) sums[0] += load(asked + place) * load(key + place);
    float score = total((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; place < size; place++) score += asked[place] * key[place];
    score *= scaling;
    return softcap > 0 ? std::tanh(score / softcap) * softcap : score;
  }

  // N vectors of the weighted mean of values.
  template <int N>
  void mix(const float* value, const std::vector<int64_t>& slots, const std::vector<float>& weights, float sum,
           float* mixed) const {
    Vector sums[N] = {};
    for (size_t seen = 0; seen < slots.size(); seen++) {
      const float* from = value + slots[seen] * values.slot;
      for (int n = 0; n < N; n++) sums[n] += weights[seen] * load(from + n * WIDTH);
    }
    for (int n = 0; n < N; n++)
      for (int lane = 0; lane < WIDTH; lane++) mixed[n * WIDTH + lane] = sums[n][lane] / sum;
  }

  void compute(int64_t row, int64_t head, const std::vector<int64_t>& slots, std::vector<float>& weights) const {
    const float* asked = query.of(head) + row * query.slot;
    const float* key = keys.of(head / groups);
    const float* value = values.of(head / groups);
    float best = -INFINITY, sum = 0;
    weights.clear();
    for (int64_t slot : slots) {
      weights.push_back(score(asked, key + slot * keys.slot));
      best = std::max(best, weights.back());
    }
    for (float& weight : weights) sum += weight = std::exp(weight - best);
    float* mixed = out + (row * heads + head) * size;
    int64_t place = 0;
    for (; place + BLOCK * WIDTH <= size; place += BLOCK * WIDTH)
      mix<BLOCK>(value + place, slots, weights, sum, mixed + place);
    for (; place + WIDTH <= size; place += WIDTH) mix<1>(value + place, slots, weights, sum, mixed + place);
    for (; place < size; place++) {
      float one = 0;
      for (size_t seen = 0; seen < slots.size(); seen++)
        one += weights[seen] * value[slots[seen] * values.slot + place];
      mixed[place] = one / sum;
    }
  }
};

// [1, rows, heads, size] from queries `asked` [1, heads, rows, size], `keys` and `values` [1, key heads, slots, size],
// whose last dimension is contiguous. For the lists see `Seen` in exact.py.
Tensor attention(const Tensor& asked, const Tensor& keys, const Tensor& values, const Tensor& text, const Tensor& first,
                 const Tensor& past, const Tensor& positions, const Tensor& tails, int64_t window, double scaling,
                 double softcap) {
  const int64_t heads = asked.size(1), rows = asked.size(2), size = asked.size(3);
  Tensor out = torch::stable::new_empty(asked, std::vector<int64_t>{1, rows, heads, size});
  const Attention work{
      Stored(asked), Stored(keys), Stored(values), out.mutable_data_ptr<float>(),
      heads, heads / keys.size(1), size,
      text.const_data_ptr<int64_t>(), first.const_data_ptr<int64_t>(), past.const_data_ptr<int64_t>(),
      positions.const_data_ptr<int64_t>(), tails.const_data_ptr<int64_t>(),
      tails.size(1), window,
      static_cast<float>(scaling), static_cast<float>(softcap)};
  const int64_t grain = 1 + GRAIN / (2 * size * (text.size(0) + tails.size(1)));
  torch::stable::parallel_for(0, rows * heads, grain, [&](int64_t begin, int64_t end) {
    std::vector<int64_t> slots;
    std::vector<float> weights;
    for (int64_t at = begin; at < end; at++) {
      if (at == begin || at % heads == 0) work.list(at / heads, slots);
      work.compute(at / heads, at % heads, slots, weights);
    }
  });
  return out;
}

template <float F(float)>
Tensor map(const Tensor& input) {
  const Tensor given = torch::stable::contiguous(input);
  Tensor out = torch::stable::empty_like(given);
  const float* from = given.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  torch::stable::parallel_for(0, given.numel(), FEW, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; at++) to[at] = F(from[at]);
  });
  return out;
}

// The mean over the last dimension, which is kept with size 1.
Tensor mean(const Tensor& input) {
  const Tensor given = torch::stable::contiguous(input);
  std::vector<int64_t> shape(given.sizes().begin(), given.sizes().end());
  const int64_t size = shape.back(), grain = 1 + GRAIN / size;
  shape.back() = 1;
  Tensor out = torch::stable::new_empty(given, shape);
  const float* from = given.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  torch::stable::parallel_for(0, out.numel(), grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const float* x = from + row * size;
      Vector sums = {};
      int64_t place = 0;
      for (; place + WIDTH <= size; place += WIDTH) sums += load(x + place);
      float sum = total(sums);
      for (; place < size; place++) sum += x[place];
      to[row] = sum / static_cast<float>(size);
    }
  });
  return out;
}

float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }
float silu(float x) { return x / (1 + std::exp(-x)); }
float gelu(float x) { return x * 0.5f * (1 + std::erf(x * static_cast<float>(M_SQRT1_2))); }
float gelu_tanh(float x) {
  return x * 0.5f * (1 + std::tanh(static_cast<float>(M_2_SQRTPI * M_SQRT1_2) * (x + 0.044715f * x * x * x)));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(outpace, library) {
  library.def(
      "exact_attention(Tensor asked, Tensor keys, Tensor values, Tensor text, Tensor first, Tensor past, "
      "Tensor positions, Tensor tails, int window, float scaling, float softcap) -> Tensor");
  for (const char* schema :
       {"exact_cos(Tensor x) -> Tensor", "exact_exp(Tensor x) -> Tensor", "exact_gelu(Tensor x) -> Tensor",
        "exact_gelu_tanh(Tensor x) -> Tensor", "exact_mean(Tensor x) -> Tensor", "exact_sigmoid(Tensor x) -> Tensor",
        "exact_silu(Tensor x) -> Tensor",
        "exact_sin(Tensor x) -> Tensor", "exact_tanh(Tensor x) -> Tensor"})
    library.def(schema);
}

STABLE_TORCH_LIBRARY_IMPL(outpace, CPU, library) {
  library.impl("exact_attention", TORCH_BOX(&attention));
  library.impl("exact_cos", TORCH_BOX(&map<std::cos>));
  library.impl("exact_exp", TORCH_BOX(&map<std::exp>));
  library.impl("exact_gelu", TORCH_BOX(&map<gelu>));
  library.impl("exact_gelu_tanh", TORCH_BOX(&map<gelu_tanh>));
  library.impl("exact_mean", TORCH_BOX(&mean));
  library.impl("exact_sigmoid", TORCH_BOX(&map<sigmoid>));
  library.impl("exact_silu", TORCH_BOX(&map<silu>));
  library.impl("exact_sin", TORCH_BOX(&map<std::sin>));
  library.impl("exact_tanh", TORCH_BOX(&map<std::tanh>));
}
