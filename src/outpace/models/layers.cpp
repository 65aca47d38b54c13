// A forward pass through decoder layers of the common form, with packed weights, in one call: norms, rotary embedding,
// attention over each row's slots, gated MLPs, and the output head.
//
// The order of every sum depends only on the row, so a row has the same bits in any tree, batch and prefill chunk.

#include <vector>

#include "packed.h"
#include "team.h"

namespace outpace {
namespace {

constexpr int64_t SHARE = 1 << 15;  // the fewest multiplications per share
constexpr int64_t SMALL = 1 << 14;  // the fewest elements per share

enum Activation : int64_t { SILU, GELU_TANH };

struct Layer {
  const float *before_attention, *after_attention, *before_mlp, *after_mlp;  // norms; after: may be null
  const float *query_norm, *key_norm;                                        // null: none
  Weights query, key, value, out, gate, up, down;
  int64_t heads, key_heads, size, window;                                    // window 0: none
  int64_t rotary;                                                            // which of the step's tables
  int64_t activation;
  double scaling, softcap, epsilon;                                          // softcap 0: none
};

struct Stack {
  const Layer* layers;
  int64_t count, width;
  const float* norm;
  Weights head;
  double epsilon, softcap;                                                   // softcap of logits; 0: none
};

struct Step {
  int64_t rows, start, stop;               // layers `start` to `stop`, exclusive
  float* hidden;                           // [rows, width] input and output
  const int64_t *positions, *slots;        // [rows]
  const int64_t *text, *first, *past, *tails;  // what rows attend to: `Seen` in exact.py
  int64_t depth;
  float *const *keys, *const *values;      // of each layer, [key heads, capacity, size]
  int64_t capacity;
  const float *const *cosines, *const *sines;  // of each type of layer, [positions, rotated]
  int64_t rotated;
  const int64_t* asked;                    // [count] the rows whose logits are requested
  int64_t count;
  float* logits;                           // [count, outputs of the head]
  int64_t threads;
};

// states / sqrt(mean of squares + epsilon) * weight
INLINE void norm(const float* from, const float* weight, int64_t size, double epsilon, float* to) {
  Floats squares = {};
  for (int64_t at = 0; at < size; at += LANES) {
    const Floats part = load<Floats>(from + at);
    squares = fused(part, part, squares);
  }
  const float by = 1.0f / std::sqrt(total(squares) / float(size) + float(epsilon));
  for (int64_t at = 0; at < size; at += LANES)
    store(to + at, load<Floats>(from + at) * by * load<Floats>(weight + at));
}

// Rotary embedding: element i of the first half is paired with element i of the second.
INLINE void rotate(float* head, const float* cosines, const float* sines, int64_t rotated) {
  const int64_t half = rotated / 2;
  for (int64_t at = 0; at < half; at++) {
    const float one = head[at], other = head[at + half];
    head[at] = one * cosines[at] - other * sines[at];
    head[at + half] = other * cosines[at + half] + one * sines[at + half];
  }
}

class Walk {
 public:
  Walk(const Stack& stack, const Step& step, Team& team) : stack_(stack), step_(step), team_(team) {}

  void run() {
    for (int64_t at = step_.start; at < step_.stop; at++) {
      const Layer& layer = stack_.layers[at];
      attend(layer, at);
      feed(layer);
    }
    if (step_.count) finish();
  }

 private:
  const Stack& stack_;
  const Step& step_;
  Team& team_;
  std::vector<Block> x_, inner_;
  std::vector<float> query_, key_, value_, mixed_, side_;

  template <class Number>
  static Number* room(std::vector<Number>& buffer, int64_t size) {
    if (int64_t(buffer.size()) < size) buffer.resize(size);
    return buffer.data();
  }

  template <class Each>
  void rows(int64_t count, int64_t size, Each&& each) {
    team_.each(count, 1 + SMALL / size, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; row++) each(row);
    });
  }

  // The products of `count` rows and several matrices with the same inputs, passed to `sink(matrix, row, panel, sums)`.
  template <int N, class Sink>
  void multiply(const Weights* const (&matrices)[N], const Block* x, int64_t count, Sink&& sink) {
    const int64_t inputs = matrices[0]->inputs, tile = tile_of(inputs / BLOCK);
    int64_t all = 0;
    for (const Weights* matrix : matrices) all += matrix->panels();
    const int64_t grain = 1 + SHARE / (LANES * inputs * std::min<int64_t>(count, MOST));
    team_.each(all, grain, [&](int64_t begin, int64_t end) {
      for (int64_t first = 0; first < count; first += tile) {
        int64_t before = 0;
        for (int n = 0; n < N; n++) {
          const int64_t panels = matrices[n]->panels();
          for (int64_t panel = std::max(begin, before); panel < std::min(end, before + panels); panel++)
            with_panel(*matrices[n], panel - before, x, first, std::min(count, first + tile),
                       [&](int64_t row, const Floats& sums) { sink(n, row, panel - before, sums); });
          before += panels;
        }
      }
    });
  }

  const Block* normed(const float* weight, double epsilon) {
    const int64_t width = stack_.width, blocks = width / BLOCK;
    Block* x = room(x_, blocks_of(step_.rows, blocks));
    float* side = room(side_, step_.rows * width);
    rows(step_.rows, width, [&](int64_t row) {
      norm(step_.hidden + row * width, weight, width, epsilon, side + row * width);
      round_row(side + row * width, blocks, x, row);
    });
    return x;
  }

  // hidden += the products, normed if there is a norm.
  void add(const Weights& weights, const Block* x, const float* weight, double epsilon) {
    const int64_t width = stack_.width;
    float* to = weight ? room(side_, step_.rows * width) : step_.hidden;
    const bool added = !weight;
    multiply<1>({&weights}, x, step_.rows, [&](int, int64_t row, int64_t panel, const Floats& sums) {
      float* place = to + row * width + panel * LANES;
      store(place, added ? load<Floats>(place) + sums : sums);
    });
    if (!weight) return;
    rows(step_.rows, width, [&](int64_t row) {
      float* side = to + row * width;
      float* hidden = step_.hidden + row * width;
      norm(side, weight, width, epsilon, side);
      for (int64_t at = 0; at < width; at += LANES)
        store(hidden + at, load<Floats>(hidden + at) + load<Floats>(side + at));
    });
  }

  void attend(const Layer& layer, int64_t number) {
    const int64_t size = layer.size, count = step_.rows, heads = layer.heads, key_heads = layer.key_heads;
    const int64_t width = heads * size, narrow = key_heads * size;
    const Block* x = normed(layer.before_attention, layer.epsilon);
    float* const to[] = {room(query_, count * width), room(key_, count * narrow), room(value_, count * narrow)};
    const int64_t strides[] = {width, narrow, narrow};
    multiply<3>({&layer.query, &layer.key, &layer.value}, x, count,
                [&](int which, int64_t row, int64_t panel, const Floats& sums) {
                  store(to[which] + row * strides[which] + panel * LANES, sums);
                });
    const int64_t each = heads + 2 * key_heads;
    rows(count * each, size, [&](int64_t at) { place(layer, number, at / each, at % each, to); });
    float* mixed = room(mixed_, count * width);
    int64_t seen = 0;
    for (int64_t row = 0; row < count; row++) seen = std::max(seen, step_.positions[row] + 1);
    team_.each(count * heads, 1 + SMALL / (2 * seen * size), [&](int64_t first, int64_t last) {
      std::vector<int64_t> slots;
      std::vector<float> scores;
      for (int64_t at = first; at < last; at++) {
        if (at == first || at % heads == 0) list(layer, at / heads, slots);
        mix(layer, number, to[0] + at * size, at % heads, slots, scores, mixed + at * size);
      }
    });
    Block* rounded = room(inner_, blocks_of(count, width / BLOCK));
    rows(count, width, [&](int64_t row) { round_row(mixed + row * width, width / BLOCK, rounded, row); });
    add(layer.out, rounded, layer.after_attention, layer.epsilon);
  }

  // Apply norm and rotary embedding to a query or key; write a key or value to its slot.
  void place(const Layer& layer, int64_t number, int64_t row, int64_t head, float* const (&from)[3]) {
    const int64_t size = layer.size, rotated = step_.rotated;
    const bool asks = head < layer.heads, keyed = head < layer.heads + layer.key_heads;
    const int64_t mine = asks ? head : (head - layer.heads) % layer.key_heads;
    float* state = from[asks ? 0 : keyed ? 1 : 2] + (row * (asks ? layer.heads : layer.key_heads) + mine) * size;
    if (keyed) {
      const float* weight = asks ? layer.query_norm : layer.key_norm;
      if (weight) norm(state, weight, size, layer.epsilon, state);
      const int64_t at = step_.positions[row] * rotated;
      rotate(state, step_.cosines[layer.rotary] + at, step_.sines[layer.rotary] + at, rotated);
    }
    if (asks) return;
    float* stored = (keyed ? step_.keys : step_.values)[number];
    std::memcpy(stored + (mine * step_.capacity + step_.slots[row]) * size, state, size * sizeof(float));
  }

  // The slots that a row attends to, in the order of positions.
  void list(const Layer& layer, int64_t row, std::vector<int64_t>& slots) const {
    const int64_t stop = step_.positions[row] + 1, past = step_.past[row];
    const int64_t start = layer.window ? std::max<int64_t>(0, stop - layer.window) : 0;
    slots.clear();
    for (int64_t at = start; at < std::min(stop, past); at++) slots.push_back(step_.text[step_.first[row] + at]);
    for (int64_t at = std::max(start, past); at < stop; at++)
      slots.push_back(step_.tails[row * step_.depth + at - past]);
  }

  void mix(const Layer& layer, int64_t number, const float* query, int64_t head, const std::vector<int64_t>& slots,
           std::vector<float>& scores, float* to) const {
    const int64_t size = layer.size, count = slots.size(), group = head / (layer.heads / layer.key_heads);
    const float* keys = step_.keys[number] + group * step_.capacity * size;
    const float* values = step_.values[number] + group * step_.capacity * size;
    scores.assign((count + LANES - 1) / LANES * LANES, -INFINITY);
    for (int64_t seen = 0; seen < count; seen++) {
      const float* key = keys + slots[seen] * size;
      Floats sums = {};
      for (int64_t at = 0; at < size; at += LANES) sums = fused(load<Floats>(query + at), load<Floats>(key + at), sums);
      scores[seen] = total(sums) * float(layer.scaling);
    }
    const float sum = weigh(layer, scores, count);
    if (size % (4 * LANES) == 0) {
      for (int64_t at = 0; at < size; at += 4 * LANES) blend<4>(values + at, size, slots, scores, sum, to + at);
    } else {
      for (int64_t at = 0; at < size; at += LANES) blend<1>(values + at, size, slots, scores, sum, to + at);
    }
  }

  // Turn scores into unnormalized softmax weights; returns their sum.
  static float weigh(const Layer& layer, std::vector<float>& scores, int64_t count) {
    const float cap = float(layer.softcap);
    Floats best = splat(-INFINITY);
    for (size_t at = 0; at < scores.size(); at += LANES) {
      Floats part = load<Floats>(&scores[at]);
      if (cap > 0) store(&scores[at], part = tanh_of(part / cap) * cap);
      best = larger(part, best);
    }
    if (cap > 0) std::fill(scores.begin() + count, scores.end(), -INFINITY);
    const float most = highest(best);
    for (size_t at = 0; at < scores.size(); at += LANES)
      store(&scores[at], exponential(load<Floats>(&scores[at]) - most));
    std::fill(scores.begin() + count, scores.end(), 0.0f);
    Floats sums = {};
    for (size_t at = 0; at < scores.size(); at += LANES) sums = sums + load<Floats>(&scores[at]);
    return total(sums);
  }

  // N vectors of the weighted mean of values.
  template <int N>
  static void blend(const float* values, int64_t size, const std::vector<int64_t>& slots,
                    const std::vector<float>& weights, float sum, float* to) {
    Floats sums[N] = {};
    for (size_t seen = 0; seen < slots.size(); seen++) {
      const float* value = values + slots[seen] * size;
      for (int n = 0; n < N; n++) sums[n] = fused(load<Floats>(value + n * LANES), splat(weights[seen]), sums[n]);
    }
    for (int n = 0; n < N; n++) store(to + n * LANES, sums[n] / sum);
  }

  void feed(const Layer& layer) {
    const Block* x = normed(layer.before_mlp, layer.epsilon);
    const int64_t units = layer.gate.outputs / BLOCK, count = step_.rows, inputs = layer.gate.inputs;
    Block* inner = room(inner_, blocks_of(count, units));
    const int64_t grain = 1 + SHARE / (4 * LANES * inputs * std::min<int64_t>(count, MOST));
    const int64_t tile = tile_of(inputs / BLOCK);
    team_.each(units, grain, [&](int64_t begin, int64_t end) {
      for (int64_t top = 0; top < count; top += tile)
        for (int64_t unit = begin; unit < end; unit++)
          for (int64_t first = top; first < std::min(count, top + tile); first += MOST)
            gated(layer, x, unit, first, std::min(first + MOST, count), inner + unit, units);
    });
    add(layer.down, inner, layer.after_mlp, layer.epsilon);
  }

  // 32 inner states of up to MOST rows, quantized.
  static void gated(const Layer& layer, const Block* x, int64_t unit, int64_t first, int64_t last, Block* to,
                    int64_t stride) {
    Floats gates[MOST][2], ups[MOST][2];
    for (int64_t half = 0; half < 2; half++) {
      with_panel(layer.gate, 2 * unit + half, x, first, last,
                 [&](int64_t row, const Floats& sums) { gates[row - first][half] = sums; });
      with_panel(layer.up, 2 * unit + half, x, first, last,
                 [&](int64_t row, const Floats& sums) { ups[row - first][half] = sums; });
    }
    for (int64_t row = first; row < last; row++) {
      alignas(64) float states[BLOCK];
      for (int half = 0; half < 2; half++) {
        const Floats& gate = gates[row - first][half];
        const Floats active = layer.activation == SILU ? silu(gate) : gelu_tanh(gate);
        store(states + half * LANES, active * ups[row - first][half]);
      }
      round_block(states, to[row / 2 * stride], row);
    }
  }

  void finish() {
    const int64_t width = stack_.width, blocks = width / BLOCK, outputs = stack_.head.outputs;
    Block* x = room(x_, blocks_of(step_.count, blocks));
    float* side = room(side_, step_.count * width);
    rows(step_.count, width, [&](int64_t row) {
      norm(step_.hidden + step_.asked[row] * width, stack_.norm, width, stack_.epsilon, side + row * width);
      round_row(side + row * width, blocks, x, row);
    });
    const float cap = float(stack_.softcap);
    multiply<1>({&stack_.head}, x, step_.count, [&](int, int64_t row, int64_t panel, const Floats& sums) {
      const int64_t some = std::min<int64_t>(LANES, outputs - panel * LANES);
      const Floats scores = cap > 0 ? tanh_of(sums / cap) * cap : sums;
      std::memcpy(step_.logits + row * outputs + panel * LANES, &scores, some * sizeof(float));
    });
  }
};

}  // namespace
}  // namespace outpace

extern "C" __attribute__((visibility("default"))) void decoder_step(const outpace::Stack* stack,
                                                                    const outpace::Step* step) {
  outpace::Team::Turn team(static_cast<int>(step->threads));
  outpace::Walk(*stack, *step, *team).run();
}
