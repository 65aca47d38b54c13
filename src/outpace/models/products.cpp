// The product of a few rows and a weight matrix: out[m, n] = sum over k of rows[m, k] * weights[n, k], plus bias.
//
// Weights have the layout of torch.nn.Linear. Every weight is loaded once for up to ROWS rows, so a few rows cost
// little more than one while memory bandwidth is the limit. The sum over k always has the same order: SUMS vector
// accumulators per output, added at the end. So a row has the same bits in any batch.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <vector>

#include "vectors.h"

namespace {

using torch::stable::Tensor;

// A block's accumulators take OUTPUTS x ROWS x SUMS registers; some must be left for the factors.
constexpr int OUTPUTS = 2, SUMS = 2, STEP = SUMS * WIDTH;
constexpr int ROWS = BYTES == 32 ? 3 : 4;
constexpr int LINE = 64 / sizeof(float);  // a cache line
constexpr int GROUP = std::max(LINE, STEP);
constexpr int AHEAD = 2;                  // how many blocks of weights ahead to prefetch
constexpr int64_t FEW = 32;               // beyond, BLAS is as fast or faster, although it packs the weights first
constexpr int64_t TOGETHER = 16;          // rows at a time: they stay in the L1 cache
constexpr int64_t NEAR = 1 << 16;         // weights that stay in the L2 cache while all rows use them
constexpr int64_t GRAIN = 1 << 15;        // the fewest multiplications per thread

struct Product {
  const float *rows, *weights, *bias;
  float* out;
  int64_t inputs, outputs;

  // M rows from `row` on, N outputs from `output` on.
  template <int N, int M>
  void block(int64_t row, int64_t output) const {
    const float* x = rows + row * inputs;
    const float* w = weights + output * inputs;
    Vector sums[N][M][SUMS] = {};
    // No branches here: with them the compiler might fuse some multiply-adds and not others.
    auto step = [&](const float* values, const float* factors, int64_t stride) {
      for (int sum = 0; sum < SUMS; sum++) {
        Vector weight[N];
        for (int n = 0; n < N; n++) weight[n] = load(factors + n * stride + sum * WIDTH);
        for (int m = 0; m < M; m++) {
          const Vector value = load(values + m * stride + sum * WIDTH);
          for (int n = 0; n < N; n++) sums[n][m][sum] += weight[n] * value;
        }
      }
    };
    int64_t k = 0;
    if (M > 1 && row == 0) {  // the first to read these weights; for a single row the hardware prefetches
      for (; k + GROUP <= inputs; k += GROUP) {
        for (int ahead = 0; ahead < N * GROUP; ahead += LINE)
          __builtin_prefetch(w + AHEAD * N * inputs + N * k + ahead, 0, 2);
        for (int part = 0; part < GROUP; part += STEP) step(x + k + part, w + k + part, inputs);
      }
    }
    for (; k + STEP <= inputs; k += STEP) step(x + k, w + k, inputs);
    if (k < inputs) {  // the remainder, padded with zeros
      float values[M][STEP] = {}, factors[N][STEP] = {};
      for (int m = 0; m < M; m++) std::copy(x + m * inputs + k, x + (m + 1) * inputs, values[m]);
      for (int n = 0; n < N; n++) std::copy(w + n * inputs + k, w + (n + 1) * inputs, factors[n]);
      step(values[0], factors[0], STEP);
    }
    for (int m = 0; m < M; m++) {
      for (int n = 0; n < N; n++) {
        Vector sum = sums[n][m][0];
        for (int more = 1; more < SUMS; more++) sum += sums[n][m][more];
        out[(row + m) * outputs + output + n] = total(sum) + (bias ? bias[output + n] : 0.0f);
      }
    }
  }

  // The same for `count` rows, 1 to M.
  template <int N, int M>
  void some(int64_t row, int64_t output, int64_t count) const {
    if constexpr (M > 1) {
      if (count < M) return some<N, M - 1>(row, output, count);
    }
    block<N, M>(row, output);
  }

  // N outputs of rows `first` to `last`.
  template <int N>
  void column(int64_t first, int64_t last, int64_t output) const {
    if (last - first == 1) {
      for (int n = 0; n < N; n++) block<1, 1>(first, output + n);
    } else {
      for (int64_t row = first; row < last; row += ROWS)
        some<N, ROWS>(row, output, std::min<int64_t>(ROWS, last - row));
    }
  }

  void part(int64_t first, int64_t last, int64_t output, int64_t stop) const {
    for (; output + OUTPUTS <= stop; output += OUTPUTS) column<OUTPUTS>(first, last, output);
    for (; output < stop; output++) column<1>(first, last, output);
  }
};

Tensor blas(const Tensor& rows, const Tensor& weights, const std::optional<Tensor>& bias) {
  std::array<StableIValue, 3> stack{
      torch::stable::detail::from(rows), torch::stable::detail::from(weights), torch::stable::detail::from(bias)};
  if (torch_call_dispatcher("aten::linear", "", stack.data(), TORCH_ABI_VERSION))
    throw std::runtime_error("aten::linear failed");
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// With `exact` never by BLAS, where a row's bits depend on the batch.
Tensor linear(const Tensor& input, const Tensor& weights, const std::optional<Tensor>& bias, bool exact) {
  const int64_t outputs = weights.size(0), inputs = weights.size(1), count = input.numel() / inputs;
  if (input.size(input.dim() - 1) != inputs) throw std::runtime_error("rows and weights of different sizes");
  if (count > FEW && !exact) return blas(input, weights, bias);
  const Tensor rows = torch::stable::contiguous(input);
  std::vector<int64_t> shape(rows.sizes().begin(), rows.sizes().end());
  shape.back() = outputs;
  Tensor out = torch::stable::new_empty(rows, shape);
  const Product product{
      rows.const_data_ptr<float>(),
      weights.const_data_ptr<float>(),
      bias ? bias->const_data_ptr<float>() : nullptr,
      out.mutable_data_ptr<float>(),
      inputs,
      outputs};
  const int64_t grain = 1 + GRAIN / (OUTPUTS * inputs);
  torch::stable::parallel_for(0, (outputs + OUTPUTS - 1) / OUTPUTS, grain, [&](int64_t begin, int64_t end) {
    const int64_t stop = std::min(outputs, end * OUTPUTS), share = OUTPUTS * (1 + NEAR / (OUTPUTS * inputs));
    for (int64_t start = begin * OUTPUTS; start < stop; start += share)
      for (int64_t first = 0; first < count; first += TOGETHER)
        product.part(first, std::min(count, first + TOGETHER), start, std::min(stop, start + share));
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(outpace, library) {
  library.def("linear(Tensor rows, Tensor weights, Tensor? bias, bool exact=False) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(outpace, CPU, library) { library.impl("linear", TORCH_BOX(&linear)); }
