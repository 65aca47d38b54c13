// A forward pass through decoder layers of the common forms in one call: norms, rotary embedding, attention over each
// row's slots, MLPs, and the output head.
//
// The order of every sum depends only on the row, so a row has the same bits in any tree, batch and prefill chunk.

#include <vector>

#include "packed.h"
#include "team.h"

namespace outpace {
namespace {

constexpr int64_t SHARE = 1 << 15;  // the fewest multiplications per share
constexpr int64_t SMALL = 1 << 14;  // the fewest elements per share
constexpr int64_t NEAR = 8;         // rows that attend together
constexpr int64_t KEYS = 32;        // keys and values that they read at a time

enum Activation : int64_t { SILU, GELU_TANH, GELU, RELU, RELU_SQUARED };

// A norm: by the root of the mean of squares, or if `centred` of squared distances to the mean.
struct Norm {
  const float *weight, *bias;              // no weight: no norm; no bias: none is added
  int64_t centred;
  double lift, epsilon;                    // `lift` is added to the weight
};

struct Layer {
  Norm before_attention, after_attention, before_mlp, after_mlp, query_norm, key_norm;
  Weights query, key, value, out, gate, up, down;  // no gate: the MLP has none
  int64_t heads, key_heads, size, window;  // window 0: none
  int64_t joined;                          // whether `query` has, for each key head, its queries, the key and the value
  int64_t together;                        // whether all heads are normed together
  int64_t rotary;                          // which of the step's tables; -1: none
  int64_t paired;                          // 0: it turns halves; otherwise neighbours, see `rotate_pairs`
  int64_t parallel;                        // whether the MLP reads what attention reads, not what it adds to
  int64_t activation;
  double scaling, softcap;                 // softcap 0: none
  double share;                            // factor of what both parts add
};

struct Stack {
  const Layer* layers;
  int64_t count, width;
  Norm norm;
  Weights head;
  double softcap;                          // of logits; 0: none
  double scale;                            // factor of logits
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

INLINE void normalize(const float* from, const Norm& norm, int64_t size, float* to) {
  Floats sums = {}, squares = {};
  if (norm.centred)
    for (int64_t at = 0; at < size; at += LANES) sums = sums + load<Floats>(from + at);
  const float mean = norm.centred ? total(sums) / float(size) : 0.0f;
  for (int64_t at = 0; at < size; at += LANES) {
    const Floats part = load<Floats>(from + at) - mean;
    squares = fused(part, part, squares);
  }
  const float by = 1.0f / std::sqrt(total(squares) / float(size) + float(norm.epsilon));
  for (int64_t at = 0; at < size; at += LANES) {
    const Floats part = (load<Floats>(from + at) - mean) * by * (load<Floats>(norm.weight + at) + float(norm.lift));
    store(to + at, norm.bias ? part + load<Floats>(norm.bias + at) : part);
  }
}

INLINE Floats activated(int64_t activation, const Floats& sums) {
  switch (activation) {
    case SILU: return silu(sums);
    case GELU_TANH: return gelu_tanh(sums);
    case GELU: return gelu(sums);
    case RELU: return relu(sums);
    default: return relu(sums) * relu(sums);
  }
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

// The same for models that pair each element with its neighbour. `each`: tables have angles once (in halves) or twice.
INLINE void rotate_pairs(float* head, const float* cosines, const float* sines, int64_t rotated, int64_t each) {
  for (int64_t at = 0; at < rotated / 2; at++) {
    const float one = head[2 * at], other = head[2 * at + 1], cosine = cosines[each * at], sine = sines[each * at];
    head[2 * at] = one * cosine - other * sine;
    head[2 * at + 1] = other * cosine + one * sine;
  }
}

class Walk {
 public:
  Walk(const Stack& stack, const Step& step, Team& team) : stack_(stack), step_(step), team_(team) {
    rounds_ = stack.head.quantized();
    for (int64_t at = step.start; at < step.stop; at++) {
      const Layer& layer = stack.layers[at];
      for (const Weights* part :
           {&layer.query, &layer.key, &layer.value, &layer.out, &layer.gate, &layer.up, &layer.down})
        rounds_ |= part->quantized();
    }
  }

  void run() {
    for (int64_t at = step_.start; at < step_.stop; at++) {
      const Layer& layer = stack_.layers[at];
      if (layer.parallel) expand(layer);
      attend(layer, at);
      if (!layer.parallel) expand(layer);
      add(layer.down, ready(states_.data(), step_.rows, layer.down.inputs, inner_, [](int64_t) {}), layer.after_mlp,
          layer);
    }
    if (step_.count) finish();
  }

 private:
  const Stack& stack_;
  const Step& step_;
  Team& team_;
  bool rounds_;  // whether some weights are quantized, so that rows must be
  std::vector<Block> x_, inner_;
  std::vector<float> query_, key_, value_, mixed_, side_, states_, woven_;

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
  void multiply(const Weights* const (&matrices)[N], const Rows& x, int64_t count, Sink&& sink) {
    const int64_t inputs = matrices[0]->inputs, tile = matrices[0]->tile(x.woven), some = x.panels();
    const auto passes = [&](const Weights* matrix) { return (matrix->panels() + some - 1) / some; };
    int64_t all = 0;
    for (const Weights* matrix : matrices) all += passes(matrix);
    const int64_t grain = 1 + SHARE / (some * LANES * inputs * std::min<int64_t>(count, MOST));
    team_.each(all, grain, [&](int64_t begin, int64_t end) {
      for (int64_t first = 0; first < count; first += tile) {
        int64_t before = 0;
        for (int n = 0; n < N; n++) {
          const int64_t mine = passes(matrices[n]);
          for (int64_t pass = std::max(begin, before); pass < std::min(end, before + mine); pass++)
            with_panels(*matrices[n], (pass - before) * some, x, first, std::min(count, first + tile),
                        [&](int64_t row, int64_t panel, const Floats& sums) { sink(n, row, panel, sums); });
          before += mine;
        }
      }
    });
  }

  // `count` rows as products take them; `each(row)` computes the numbers of one.
  template <class Each>
  Rows ready(float* numbers, int64_t count, int64_t size, std::vector<Block>& buffer, Each&& each) {
    const int64_t blocks = size / BLOCK;
    if (!rounds_ && count >= WOVEN) {
      const int64_t groups = (count + MOST_WOVEN - 1) / MOST_WOVEN;
      float* woven = room(woven_, groups * MOST_WOVEN * size);
      team_.each(groups, 1, [&](int64_t first, int64_t last) {
        for (int64_t row = first * MOST_WOVEN, stop; row < std::min(count, last * MOST_WOVEN); row = stop) {
          stop = std::min(count, row + MOST_WOVEN);
          for (int64_t one = row; one < stop; one++) each(one);
          weave(numbers + row * size, stop - row, size, woven + row * size);
        }
      });
      return {woven, nullptr, true};
    }
    Block* x = rounds_ ? room(buffer, blocks_of(count, blocks)) : nullptr;
    rows(count, size, [&](int64_t row) {
      each(row);
      if (x) round_row(numbers + row * size, blocks, x, row);
    });
    return {numbers, x, false};
  }

  Rows normed(const Norm& norm) {
    const int64_t width = stack_.width;
    float* side = room(side_, step_.rows * width);
    return ready(side, step_.rows, width, x_, [&](int64_t row) {
      const float* from = step_.hidden + row * width;
      if (norm.weight)
        normalize(from, norm, width, side + row * width);
      else
        std::memcpy(side + row * width, from, width * sizeof(float));
    });
  }

  // hidden += share * the products, normed if there is a norm.
  void add(const Weights& weights, const Rows& x, const Norm& norm, const Layer& layer) {
    const int64_t width = stack_.width;
    float* to = norm.weight ? room(side_, step_.rows * width) : step_.hidden;
    const float share = float(layer.share);
    const bool added = !norm.weight;
    multiply<1>({&weights}, x, step_.rows, [&](int, int64_t row, int64_t panel, const Floats& sums) {
      float* place = to + row * width + panel * LANES;
      store(place, added ? load<Floats>(place) + sums * share : sums);
    });
    if (added) return;
    rows(step_.rows, width, [&](int64_t row) {
      float* side = to + row * width;
      float* hidden = step_.hidden + row * width;
      normalize(side, norm, width, side);
      for (int64_t at = 0; at < width; at += LANES)
        store(hidden + at, load<Floats>(hidden + at) + load<Floats>(side + at) * share);
    });
  }

  void attend(const Layer& layer, int64_t number) {
    const int64_t size = layer.size, count = step_.rows, heads = layer.heads, key_heads = layer.key_heads;
    const int64_t width = heads * size, narrow = key_heads * size;
    const Rows x = normed(layer.before_attention);
    float* const to[] = {room(query_, count * width), room(key_, count * narrow), room(value_, count * narrow)};
    const int64_t strides[] = {width, narrow, narrow};
    if (layer.joined)  // for each key head: its queries, the key, the value
      multiply<1>({&layer.query}, x, count, [&](int, int64_t row, int64_t panel, const Floats& sums) {
        const int64_t each = heads / key_heads, head = panel * LANES / size, inside = panel * LANES % size;
        const int64_t group = head / (each + 2), member = head % (each + 2);
        const int64_t which = std::max<int64_t>(0, member - each + 1);
        const int64_t mine = which ? group : group * each + member;
        store(to[which] + row * strides[which] + mine * size + inside, sums);
      });
    else
      multiply<3>({&layer.query, &layer.key, &layer.value}, x, count,
                  [&](int which, int64_t row, int64_t panel, const Floats& sums) {
                    store(to[which] + row * strides[which] + panel * LANES, sums);
                  });
    if (layer.together)
      rows(count, width, [&](int64_t row) {
        normalize(to[0] + row * width, layer.query_norm, width, to[0] + row * width);
        normalize(to[1] + row * narrow, layer.key_norm, narrow, to[1] + row * narrow);
      });
    const int64_t each = heads + 2 * key_heads;
    rows(count * each, size, [&](int64_t at) { place(layer, number, at / each, at % each, to); });
    float* mixed = room(mixed_, count * width);
    int64_t seen = 0;
    for (int64_t row = 0; row < count; row++) seen = std::max(seen, step_.positions[row] + 1);
    const int64_t tiles = (count + NEAR - 1) / NEAR;
    team_.each(tiles * heads, 1 + SMALL / (2 * std::min(count, NEAR) * seen * size), [&](int64_t first, int64_t last) {
      std::vector<Seen> tile;
      for (int64_t at = first; at < last; at++) {
        const int64_t row = at / heads * NEAR, head = at % heads;
        if (at == first || head == 0) list(layer, row, std::min(count, row + NEAR), tile);
        mix(layer, number, head, to[0] + (row * heads + head) * size, tile, mixed + (row * heads + head) * size);
      }
    });
    add(layer.out, ready(mixed, count, width, inner_, [](int64_t) {}), layer.after_attention, layer);
  }

  // Apply norm and rotary embedding to a query or key; write a key or value to its slot.
  void place(const Layer& layer, int64_t number, int64_t row, int64_t head, float* const (&from)[3]) {
    const int64_t size = layer.size, rotated = step_.rotated;
    const bool asks = head < layer.heads, keyed = head < layer.heads + layer.key_heads;
    const int64_t mine = asks ? head : (head - layer.heads) % layer.key_heads;
    float* state = from[asks ? 0 : keyed ? 1 : 2] + (row * (asks ? layer.heads : layer.key_heads) + mine) * size;
    if (keyed) {
      const Norm& norm = asks ? layer.query_norm : layer.key_norm;
      if (norm.weight && !layer.together) normalize(state, norm, size, state);
      if (layer.rotary >= 0) {
        const int64_t at = step_.positions[row] * rotated;
        const float *cosines = step_.cosines[layer.rotary] + at, *sines = step_.sines[layer.rotary] + at;
        if (layer.paired)
          rotate_pairs(state, cosines, sines, rotated, layer.paired);
        else
          rotate(state, cosines, sines, rotated);
      }
    }
    if (asks) return;
    float* stored = (keyed ? step_.keys : step_.values)[number];
    std::memcpy(stored + (mine * step_.capacity + step_.slots[row]) * size, state, size * sizeof(float));
  }

  // What a row attends to: slots, in the order of positions; and their weights for a head.
  struct Seen {
    std::vector<int64_t> slots;
    std::vector<float> weights;
    float sum;
    int64_t count() const { return slots.size(); }
  };

  void list(const Layer& layer, int64_t first, int64_t last, std::vector<Seen>& tile) const {
    tile.resize(last - first);
    for (int64_t row = first; row < last; row++) {
      std::vector<int64_t>& slots = tile[row - first].slots;
      const int64_t stop = step_.positions[row] + 1, past = step_.past[row];
      const int64_t start = layer.window ? std::max<int64_t>(0, stop - layer.window) : 0;
      slots.clear();
      for (int64_t at = start; at < std::min(stop, past); at++) slots.push_back(step_.text[step_.first[row] + at]);
      for (int64_t at = std::max(start, past); at < stop; at++)
        slots.push_back(step_.tails[row * step_.depth + at - past]);
    }
  }

  // A head of all rows of a tile. Keys and values that the rows share are read some at a time, for all of them.
  void mix(const Layer& layer, int64_t number, int64_t head, const float* query, std::vector<Seen>& tile,
           float* to) const {
    const int64_t size = layer.size, group = head / (layer.heads / layer.key_heads), stride = layer.heads * size;
    const float* keys = step_.keys[number] + group * step_.capacity * size;
    const float* values = step_.values[number] + group * step_.capacity * size;
    int64_t shared = tile[0].count();
    for (const Seen& row : tile) {
      const auto end = row.slots.begin() + std::min(shared, row.count());
      shared = std::mismatch(row.slots.begin(), end, tile[0].slots.begin()).first - row.slots.begin();
    }
    for (Seen& row : tile) row.weights.assign((row.count() + LANES - 1) / LANES * LANES, -INFINITY);
    in_parts(tile, shared, [&](int64_t row, int64_t first, int64_t last) {
      score(query + row * stride, keys, size, float(layer.scaling), tile[row], first, last);
    });
    for (Seen& row : tile) row.sum = weigh(layer, row.weights, row.count());
    for (size_t row = 0; row < tile.size(); row++) std::fill_n(to + row * stride, size, 0.0f);
    in_parts(tile, shared, [&](int64_t row, int64_t first, int64_t last) {
      for (int64_t at = 0, some; at < size; at += some) {
        some = size - at >= 4 * LANES ? 4 * LANES : LANES;
        (some > LANES ? blend<4> : blend<1>)(values + at, size, tile[row], first, last, to + row * stride + at);
      }
    });
    for (size_t row = 0; row < tile.size(); row++)
      for (int64_t at = 0; at < size; at += LANES)
        store(to + row * stride + at, load<Floats>(to + row * stride + at) / tile[row].sum);
  }

  // Call `use(row, first, last)` until every row has all that it attends to: in order, and in turn where rows share it.
  template <class Use>
  static void in_parts(const std::vector<Seen>& tile, int64_t shared, Use&& use) {
    for (int64_t first = 0; first < shared; first += KEYS)
      for (size_t row = 0; row < tile.size(); row++) use(row, first, std::min(shared, first + KEYS));
    for (size_t row = 0; row < tile.size(); row++) use(row, shared, tile[row].count());
  }

  static void score(const float* query, const float* keys, int64_t size, float scaling, Seen& row, int64_t first,
                    int64_t last) {
    if (size == 64) return score<64>(query, keys, size, scaling, row, first, last);
    if (size == 128) return score<128>(query, keys, size, scaling, row, first, last);
    score<0>(query, keys, size, scaling, row, first, last);
  }

  // SIZE: `size`, if it is known.
  template <int SIZE>
  static void score(const float* query, const float* keys, int64_t size, float scaling, Seen& row, int64_t first,
                    int64_t last) {
    if (SIZE) size = SIZE;
    const auto dot = [&](int64_t at) ALWAYS {
      const float* key = keys + row.slots[at] * size;
      Floats sums = {};
      for (int64_t n = 0; n < size; n += LANES) sums = fused(load<Floats>(query + n), load<Floats>(key + n), sums);
      return sums;
    };
    for (; first + PART <= last; first += PART) {
      FloatPart sums[PART];
      UNROLL for (int at = 0; at < PART; at++) sums[at] = halved(dot(first + at));
      store(&row.weights[first], totals(sums) * scaling);
    }
    for (; first < last; first++) row.weights[first] = total(dot(first)) * scaling;
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

  // Add weighted values to N vectors.
  template <int N>
  static void blend(const float* values, int64_t size, const Seen& row, int64_t first, int64_t last, float* to) {
    Floats sums[N];
    for (int n = 0; n < N; n++) sums[n] = load<Floats>(to + n * LANES);
    for (int64_t at = first; at < last; at++) {
      const float* value = values + row.slots[at] * size;
      for (int n = 0; n < N; n++) sums[n] = fused(load<Floats>(value + n * LANES), splat(row.weights[at]), sums[n]);
    }
    for (int n = 0; n < N; n++) store(to + n * LANES, sums[n]);
  }

  // The inner states of the MLP, in `states_`.
  void expand(const Layer& layer) {
    const Rows x = normed(layer.before_mlp);
    const int64_t units = layer.up.outputs / BLOCK, count = step_.rows, inputs = layer.up.inputs;
    float* states = room(states_, count * units * BLOCK);
    if (!layer.gate.cells) {
      multiply<1>({&layer.up}, x, count, [&](int, int64_t row, int64_t panel, const Floats& sums) {
        store(states + row * units * BLOCK + panel * LANES, activated(layer.activation, sums));
      });
      return;
    }
    const int64_t grain = 1 + SHARE / (4 * LANES * inputs * std::min<int64_t>(count, MOST));
    const int64_t tile = layer.gate.tile(x.woven);
    team_.each(units, grain, [&](int64_t begin, int64_t end) {
      for (int64_t first = 0; first < count; first += tile)
        for (int64_t unit = begin; unit < end; unit++)
          gated(layer, x, unit, first, std::min(count, first + tile), states);
    });
  }

  // 32 inner states of rows `first` to `last`.
  static void gated(const Layer& layer, const Rows& x, int64_t unit, int64_t first, int64_t last, float* states) {
    const int64_t inner = layer.gate.outputs, some = x.panels();
    for (int64_t panel = 2 * unit; panel < 2 * unit + 2; panel += some) {
      with_panels(layer.gate, panel, x, first, last, [&](int64_t row, int64_t panel, const Floats& sums) {
        store(states + row * inner + panel * LANES, activated(layer.activation, sums));
      });
      with_panels(layer.up, panel, x, first, last, [&](int64_t row, int64_t panel, const Floats& sums) {
        float* to = states + row * inner + panel * LANES;
        store(to, load<Floats>(to) * sums);
      });
    }
  }

  void finish() {
    const int64_t width = stack_.width, outputs = stack_.head.outputs;
    float* side = room(side_, step_.count * width);
    const Rows x = ready(side, step_.count, width, x_, [&](int64_t row) {
      normalize(step_.hidden + step_.asked[row] * width, stack_.norm, width, side + row * width);
    });
    const float cap = float(stack_.softcap), scale = float(stack_.scale);
    multiply<1>({&stack_.head}, x, step_.count, [&](int, int64_t row, int64_t panel, const Floats& sums) {
      const int64_t some = std::min<int64_t>(LANES, outputs - panel * LANES);
      const Floats scores = (cap > 0 ? tanh_of(sums / cap) * cap : sums) * scale;
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
