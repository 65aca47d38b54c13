// The product of a few rows with a matrix of weights: out[m, n] = sum over k of rows[m, k] * weights[n, k], plus bias.
//
// Weights lie as torch.nn.Linear keeps them. Every weight is loaded once for up to ROWS rows, so a few rows cost little
// more than one, as long as memory is the limit. The sum over k runs in the same order whatever is computed beside it:
// one running vector for each output, WIDTH terms at a time. So a row's result has the same bits beside any other rows.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

namespace {

using torch::stable::Tensor;

// A vector register, and a block of sums that fits in the registers together with what is multiplied.
#if defined(__AVX512F__)
constexpr int BYTES = 64, OUTPUTS = 4, ROWS = 4;
#elif defined(__AVX__)
constexpr int BYTES = 32, OUTPUTS = 3, ROWS = 4;
#else
constexpr int BYTES = 16, OUTPUTS = 4, ROWS = 4;
#endif
constexpr int WIDTH = BYTES / sizeof(float);
constexpr int LINE = 64 / sizeof(float);  // of the cache
constexpr int64_t FEW = 16;               // from more rows on, BLAS is quicker, though it packs the weights first
constexpr int64_t GRAIN = 1 << 15;        // multiplications that are worth a thread

typedef float Vector __attribute__((vector_size(BYTES), aligned(alignof(float)), may_alias));

inline Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }

inline Vector load(const float* from, int64_t count) {
  Vector part{};
  std::memcpy(&part, from, count * sizeof(float));
  return part;
}

inline float total(Vector sums) {
  for (int half = WIDTH / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; lane++) sums[lane] += sums[lane + half];
  return sums[0];
}

struct Product {
  const float *rows, *weights, *bias;
  float* out;
  int64_t inputs, outputs;

  // M rows from `row` on, N outputs from `output` on. The first to read these weights fetches the next.
  template <int N, int M>
  void block(int64_t row, int64_t output) const {
    const float* x = rows + row * inputs;
    const float* w = weights + output * inputs;
    Vector sums[N][M] = {};
    auto add = [&](auto get) {
      Vector weight[N];
      for (int n = 0; n < N; n++) weight[n] = get(w + n * inputs);
      for (int m = 0; m < M; m++) {
        const Vector value = get(x + m * inputs);
        for (int n = 0; n < N; n++) sums[n][m] += weight[n] * value;
      }
    };
    int64_t k = 0;
    if (row == 0) {
      for (; k + LINE <= inputs; k += LINE) {
        for (int n = 0; n < N; n++) __builtin_prefetch(w + N * inputs + N * k + n * LINE, 0, 2);
        for (int part = 0; part < LINE; part += WIDTH) add([&](const float* from) { return load(from + k + part); });
      }
    }
    for (; k + WIDTH <= inputs; k += WIDTH) add([&](const float* from) { return load(from + k); });
    if (k < inputs) add([&](const float* from) { return load(from + k, inputs - k); });
    for (int m = 0; m < M; m++)
      for (int n = 0; n < N; n++)
        out[(row + m) * outputs + output + n] = total(sums[n][m]) + (bias ? bias[output + n] : 0.0f);
  }

  // The same for `count` rows, 1 to M.
  template <int N, int M>
  void some(int64_t row, int64_t output, int64_t count) const {
    if constexpr (M > 1) {
      if (count < M) return some<N, M - 1>(row, output, count);
    }
    block<N, M>(row, output);
  }

  template <int N>
  void column(int64_t output, int64_t count) const {
    for (int64_t row = 0; row < count; row += ROWS) some<N, ROWS>(row, output, std::min<int64_t>(ROWS, count - row));
  }
};

Tensor blas(const Tensor& rows, const Tensor& weights, const std::optional<Tensor>& bias) {
  std::array<StableIValue, 3> stack{
      torch::stable::detail::from(rows), torch::stable::detail::from(weights), torch::stable::detail::from(bias)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linear", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

Tensor linear(const Tensor& input, const Tensor& weights, const std::optional<Tensor>& bias) {
  const int64_t outputs = weights.size(0), inputs = weights.size(1), count = input.numel() / inputs;
  if (count > FEW) return blas(input, weights, bias);
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
    int64_t output = begin * OUTPUTS;
    const int64_t stop = std::min(outputs, end * OUTPUTS);
    for (; output + OUTPUTS <= stop; output += OUTPUTS) product.column<OUTPUTS>(output, count);
    for (; output < stop; output++) product.column<1>(output, count);
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(outpace, library) {
  library.def("linear(Tensor rows, Tensor weights, Tensor? bias) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(outpace, CPU, library) { library.impl("linear", TORCH_BOX(&linear)); }
