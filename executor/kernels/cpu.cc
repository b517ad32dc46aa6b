// A step's matrix products and attention for a CPU; executor/kernels/__init__.py says what for.
//
// Vectors are the compiler's own, so the same text serves any CPU; it is compiled for the one at hand.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <vector>

#include <sched.h>
#include <sys/mman.h>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int kWidth = 8;            // floats in a vector
constexpr int kPanel = 2 * kWidth;   // columns of a weight that lie together
constexpr int kLine = 16;            // floats in a line of the caches

typedef float Vector __attribute__((vector_size(4 * kWidth), aligned(4)));
typedef int32_t Integers __attribute__((vector_size(4 * kWidth)));

inline Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }
inline void store(float* to, Vector value) { *reinterpret_cast<Vector*>(to) = value; }
inline Vector spread(float value) { return value - Vector{}; }

// Keeps a value in a register: the compiler would load it again for each use, and loads are what there are too few of.
inline void hold(Vector& value) {
#if defined(__x86_64__)
  asm("" : "+v"(value));
#endif
}

// The sums of four vectors.
inline void sums(const Vector* of, float* to) {
  const auto fold = [](Vector a, Vector b) {
    return __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13) +
           __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
  };
  const Vector first = fold(of[0], of[1]), second = fold(of[2], of[3]);
  const Vector both = __builtin_shufflevector(first, second, 0, 1, 8, 9, 4, 5, 12, 13) +
                      __builtin_shufflevector(first, second, 2, 3, 10, 11, 6, 7, 14, 15);
  for (int i = 0; i < 4; ++i) to[i] = both[i] + both[i + 4];
}

inline float sum(Vector value) {
  float total = 0;
  for (int i = 0; i < kWidth; ++i) total += value[i];
  return total;
}

// Tasks in parallel

constexpr int kPatience = 500;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Calls `task(i)` for each i below `count`, on this thread and those of the pool that are free. Each thread has a range
// of its own, which it goes through in order, so that it knows what it will need next; then it takes from the others'
// what is left there, so that one that the machine holds up delays the others by a single task.
template <typename Task>
void in_parallel(ffi::ThreadPool& pool, int64_t count, const Task& task) {
  const int64_t threads = std::min<int64_t>(pool.num_threads(), count);
  if (threads < 2) {
    for (int64_t i = 0; i < count; ++i) task(i);
    return;
  }
  struct alignas(64) Range {
    std::atomic<int64_t> next;
    int64_t end;
  };
  struct Shared {
    std::vector<Range> ranges;
    std::atomic<int64_t> joined{0}, done{0};
  };
  // Helpers may come when all is done and this call is over; they look at `shared` only.
  auto shared = std::make_shared<Shared>();
  shared->ranges = std::vector<Range>(threads);
  for (int64_t i = 0; i < threads; ++i) {
    shared->ranges[i].next = count * i / threads;
    shared->ranges[i].end = count * (i + 1) / threads;
  }
  auto take = [shared, threads, &task] {
    const int64_t own = shared->joined.fetch_add(1, std::memory_order_relaxed);
    for (int64_t other = 0; other < threads; ++other) {
      Range& range = shared->ranges[(own + other) % threads];
      for (int64_t i; (i = range.next.fetch_add(1, std::memory_order_relaxed)) < range.end;) {
        task(i);
        shared->done.fetch_add(1, std::memory_order_release);
      }
    }
  };
  for (int64_t i = 1; i < threads; ++i) pool.Schedule(std::function<void()>(take));
  take();
  for (int turn = 0; shared->done.load(std::memory_order_acquire) < count; ++turn) {
    if (turn < kPatience) {
      pause();
    } else {
      sched_yield();  // whoever holds the last task may be waiting for this processor
    }
  }
}

// Products

constexpr int kRows = 6;          // rows of x that are multiplied at once: as many as the registers hold
constexpr int64_t kAhead = 16;    // elements of a panel's columns that are asked for before they are needed
constexpr int64_t kDeep = 288;    // elements of a panel's columns that are gone through at once: half the first cache
constexpr int64_t kTall = 96;     // rows of x in a task, at most: they stay in the second-level cache
constexpr int64_t kTaskWork = 1 << 16;  // multiplications of a task, at least

// out[rows × kPanel] = x[rows × depth] · panel[depth × kPanel], added to what is there if `add`. Meanwhile memory from
// `soon` on is asked for, a line of the cache each `every` elements.
//
// Each element is summed in the same order whatever `rows` is, so it does not depend on what else is in a batch.
template <int rows>
void multiply(const float* x, int64_t x_stride, const float* panel, int64_t depth, float* out, int64_t out_stride,
              bool add, const float* soon, int64_t every) {
  Vector total[rows][2] = {};
  if (add) {
    for (int i = 0; i < rows; ++i) {
      for (int j = 0; j < 2; ++j) total[i][j] = load(out + i * out_stride + j * kWidth);
    }
  }
  for (int64_t k = 0; k < depth;) {
    __builtin_prefetch(soon, 0, 2);
    soon += kPanel;
    for (const int64_t stop = std::min(depth, k + every); k < stop; ++k) {
      Vector left = load(panel + k * kPanel), right = load(panel + k * kPanel + kWidth);
      hold(left), hold(right);
      for (int i = 0; i < rows; ++i) {
        const Vector factor = spread(x[i * x_stride + k]);
        total[i][0] += factor * left;
        total[i][1] += factor * right;
      }
    }
  }
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < 2; ++j) store(out + i * out_stride + j * kWidth, total[i][j]);
  }
}

using Multiply = void (*)(const float*, int64_t, const float*, int64_t, float*, int64_t, bool, const float*, int64_t);
constexpr Multiply kMultiply[] = {nullptr,     multiply<1>, multiply<2>, multiply<3>,
                                  multiply<4>, multiply<5>, multiply<6>};

// Rows `begin` to `end` of x [·, depth] times one panel, to where `out` says, in lines that lie `stride` apart. `next`
// is the panel that this thread is likely to take then.
void multiply_panel(const float* x, const float* panel, const float* next, float* out, int64_t begin, int64_t end,
                    int64_t depth, int64_t stride) {
  const int64_t rows = end - begin, groups = (rows + kRows - 1) / kRows;
  const int64_t pieces = (depth + kDeep - 1) / kDeep, deep = (depth + pieces - 1) / pieces;
  for (int64_t from = 0; from < depth; from += deep) {
    const int64_t now = std::min(deep, depth - from), share = (deep + groups - 1) / groups;
    const float* piece = panel + from * kPanel;
    // While a piece is gone through again and again, the next one comes, a share with each group.
    const float* soon = from + deep < depth ? piece + deep * kPanel : next;
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t first = begin + rows * group / groups, count = begin + rows * (group + 1) / groups - first;
      kMultiply[count](x + first * depth + from, depth, piece, now, out + first * stride, stride, from > 0,
                       groups > 1 ? soon + group * share * kPanel : piece + kAhead * kPanel, groups);
    }
  }
}

// e^x for x ≤ 0; 0 below -87.
inline Vector exponential(Vector x) {
  const Vector least = spread(-87.3f);
  const auto tiny = x < least;
  x = tiny ? least : x;
  const Vector magic = spread(12582912.0f);  // adding it rounds to an integer
  const Vector shifted = x * 1.44269504f + magic;
  const Vector whole = shifted - magic;
  const Vector rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  Vector value = spread(1.9875691500e-4f);
  value = value * rest + 1.3981999507e-3f;
  value = value * rest + 8.3334519073e-3f;
  value = value * rest + 4.1665795894e-2f;
  value = value * rest + 1.6666665459e-1f;
  value = value * rest + 5.0000001201e-1f;
  value = value * rest * rest + rest + 1.0f;
  const Integers power = (__builtin_convertvector(whole, Integers) + 127) << 23;
  Vector scale;
  std::memcpy(&scale, &power, sizeof scale);
  return tiny ? Vector{} : value * scale;
}

// Rows of x without those at its end that begin with NaN. Their products are NaN, which takes no computing: steps mark
// their padding so.
int64_t live_rows(const float* x, int64_t rows, int64_t depth) {
  while (rows > 0 && std::isnan(x[(rows - 1) * depth])) --rows;
  return rows;
}

// Calls `panel_task(begin, end, panel, next)` for bands of rows and each of `panels` panels, in parallel. `next` is the
// panel that the thread is likely to take then.
template <typename PanelTask>
void over_panels(ffi::ThreadPool& pool, int64_t rows, int64_t depth, int64_t panels, const PanelTask& panel_task) {
  if (rows == 0) return;
  const int64_t bands = (rows + kTall - 1) / kTall, tall = (rows + bands - 1) / bands;
  const int64_t grain = std::clamp<int64_t>(kTaskWork / std::max<int64_t>(1, tall * depth * kPanel), 1, panels);
  const int64_t runs = (panels + grain - 1) / grain;
  in_parallel(pool, bands * runs, [&](int64_t task) {
    const int64_t begin = task / runs * tall, end = std::min(rows, begin + tall), run = task % runs;
    for (int64_t panel = panels * run / runs; panel < panels * (run + 1) / runs; ++panel) {
      panel_task(begin, end, panel, panel + 1 < panels ? panel + 1 : 0);
    }
  });
}

struct Weight {
  const float* panels;
  float* out;
  int64_t first, width;  // its first panel among those of all weights, and its columns
};

// Several products of x [..., depth]: out [..., width] = x · weight, which lies in panels [panels, depth, kPanel].
ffi::Error products(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::RemainingArgs weights,
                    ffi::RemainingRets outs) {
  const int64_t depth = x.dimensions().back(), all = x.element_count() / depth;
  const float* from = x.typed_data();
  const int64_t rows = live_rows(from, all, depth);
  std::vector<Weight> parts;
  int64_t panels = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    auto weight = weights.get<ffi::Buffer<ffi::F32>>(i);
    auto out = outs.get<ffi::Buffer<ffi::F32>>(i);
    if (!weight || !out) return ffi::Error::InvalidArgument("weights and products must be float32");
    const auto shape = weight->dimensions();
    const int64_t width = (*out)->dimensions().back();
    if (shape.size() != 3 || shape[1] != depth || shape[2] != kPanel || width != shape[0] * kPanel) {
      return ffi::Error::InvalidArgument("a weight must be [panels, depth, panel width] as x and the product need it");
    }
    parts.push_back({weight->typed_data(), (*out)->typed_data(), panels, width});
    panels += shape[0];
    std::fill((*out)->typed_data() + rows * width, (*out)->typed_data() + all * width,
              std::numeric_limits<float>::quiet_NaN());
  }
  const auto part_of = [&](int64_t panel) {
    size_t i = parts.size() - 1;
    while (parts[i].first > panel) --i;
    return parts[i];
  };
  over_panels(pool, rows, depth, panels, [&](int64_t begin, int64_t end, int64_t panel, int64_t next) {
    const Weight part = part_of(panel), then = part_of(next);
    const int64_t own = panel - part.first;
    multiply_panel(from, part.panels + own * depth * kPanel, then.panels + (next - then.first) * depth * kPanel,
                   part.out + own * kPanel, begin, end, depth, part.width);
  });
  return ffi::Error::Success();
}

// x / (1 + e^-z)
inline Vector weigh(Vector x, Vector z) {
  const Vector small = exponential(z < 0 ? z : -z);
  return x * (z < 0 ? small : spread(1.0f)) / (1.0f + small);
}

inline Vector activate(Vector x, bool gelu) {
  return weigh(x, gelu ? 1.59576912f * (x + 0.044715f * x * x * x) : x);
}

// out [..., width] = activation(x · gate) × (x · up), both weights in panels. The activation is GELU, as tanh has it, or
// else SiLU.
ffi::Error gated(ffi::ThreadPool pool, bool gelu, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> gate,
                 ffi::Buffer<ffi::F32> up, ffi::ResultBuffer<ffi::F32> out) {
  const int64_t depth = x.dimensions().back(), all = x.element_count() / depth;
  const int64_t panels = gate.dimensions().front(), width = out->dimensions().back();
  for (const auto& shape : {gate.dimensions(), up.dimensions()}) {
    if (shape.size() != 3 || shape[0] != panels || shape[1] != depth || shape[2] != kPanel || width != panels * kPanel) {
      return ffi::Error::InvalidArgument("a weight must be [panels, depth, panel width] as x and the product need it");
    }
  }
  const float* from = x.typed_data();
  float* to = out->typed_data();
  const int64_t rows = live_rows(from, all, depth);
  std::fill(to + rows * width, to + all * width, std::numeric_limits<float>::quiet_NaN());
  const int64_t size = depth * kPanel;
  over_panels(pool, rows, depth, panels, [&](int64_t begin, int64_t end, int64_t panel, int64_t next) {
    const float *gates = gate.typed_data() + panel * size, *ups = up.typed_data();
    float factors[kTall * kPanel];
    multiply_panel(from + begin * depth, ups + panel * size, gates, factors, 0, end - begin, depth, kPanel);
    multiply_panel(from, gates, ups + next * size, to + panel * kPanel, begin, end, depth, width);
    for (int64_t row = begin; row < end; ++row) {
      float* line = to + row * width + panel * kPanel;
      const float* factor = factors + (row - begin) * kPanel;
      for (int j = 0; j < kPanel; j += kWidth) store(line + j, activate(load(line + j), gelu) * load(factor + j));
    }
  });
  return ffi::Error::Success();
}

// Attention

constexpr int64_t kChunk = 64;     // positions whose scores are held at once
constexpr int64_t kTile = 8;       // tokens of a sequence whose queries are gone through together
constexpr int64_t kSoon = kChunk;  // positions after which a key or a value is used that is asked for now
constexpr float kMasked = -1e30f;  // score of a position that is not to be seen

// What will be read is asked for in the order in which it lies in memory, evenly while other work is done, and long
// before it is used: that keeps the memory busy, which gives half as much in another order. What is asked for are
// `width` floats from `offset` on of each place up to `last`.
struct Soon {
  const float *const *place, *const *last;
  int64_t offset, width, at;
  void ask() {
    __builtin_prefetch(*place + offset + at, 0, 2);
    at += kLine;
    if (at >= width) at = 0, place += place < last;
  }
};

// scores[i][p] of `rows` queries, each `dim` long, with the keys that lie at `offset` of four places. If `ahead`, as much
// is asked for as is read.
template <int rows, bool ahead>
void score(const float* queries, const float* const* places, int64_t offset, int64_t dim, float* scores, Soon& soon) {
  Vector total[rows][4] = {};
  for (int64_t d = 0; d < dim; d += kWidth) {
    Vector query[rows];
    for (int i = 0; i < rows; ++i) query[i] = load(queries + i * dim + d);
    if (ahead) soon.ask(), soon.ask();
    for (int p = 0; p < 4; ++p) {
      const Vector key = load(places[p] + offset + d);
      for (int i = 0; i < rows; ++i) total[i][p] += query[i] * key;
    }
  }
  for (int i = 0; i < rows; ++i) sums(total[i], scores + i * kChunk);
}

// mixed[i] += Σ weights[i][p] · the value at `offset` of places[p], over `vectors` vectors of the head; `ahead` as above.
template <int rows, int vectors, bool ahead>
void mix(const float* weights, const float* const* places, int64_t offset, int64_t positions, int64_t dim,
         float* mixed, Soon& soon) {
  Vector total[rows][vectors];
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < vectors; ++j) total[i][j] = load(mixed + i * dim + j * kWidth);
  }
  for (int64_t p = 0; p < positions; ++p) {
    if (ahead) {
      for (int j = 0; j < vectors; j += kLine / kWidth) soon.ask();
    }
    Vector value[vectors];
    for (int j = 0; j < vectors; ++j) value[j] = load(places[p] + offset + j * kWidth);
    for (int i = 0; i < rows; ++i) {
      const Vector weight = spread(weights[i * kChunk + p]);
      for (int j = 0; j < vectors; ++j) total[i][j] += weight * value[j];
    }
  }
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < vectors; ++j) store(mixed + i * dim + j * kWidth, total[i][j]);
  }
}

template <int rows, bool ahead>
void mix_heads(const float* weights, const float* const* places, int64_t offset, int64_t positions, int64_t dim,
               float* mixed, Soon& soon) {
  int64_t d = 0;
  for (; d + 4 * kWidth <= dim; d += 4 * kWidth) {
    mix<rows, 4, ahead>(weights, places, offset + d, positions, dim, mixed + d, soon);
  }
  for (; d < dim; d += kWidth) mix<rows, 1, ahead>(weights, places, offset + d, positions, dim, mixed + d, soon);
}

constexpr decltype(&score<1, true>) kScore[][2] = {
    {}, {score<1, false>, score<1, true>}, {score<2, false>, score<2, true>}, {score<3, false>, score<3, true>}};
constexpr decltype(&mix_heads<1, true>) kMix[][2] = {{},
                                                     {mix_heads<1, false>, mix_heads<1, true>},
                                                     {mix_heads<2, false>, mix_heads<2, true>},
                                                     {mix_heads<3, false>, mix_heads<3, true>}};
constexpr int64_t kTilesPerThread = 4;
constexpr int64_t kTogether = 3;  // queries that share what is loaded of keys and values

struct Shape {
  int64_t tokens, heads, kv_heads, dim, blocks, block_size, sequences, table;
  int64_t shared() const { return heads / kv_heads; }
  int64_t position_stride() const { return 2 * kv_heads * dim; }
};

struct Options {
  float scale, soft_cap;  // a soft cap of 0 is none
  int64_t window;         // positions that are seen, with the token's own; 0: all
};

// What is left of memory from one task to the next on a thread.
struct Scratch {
  std::vector<float> queries, mixed, scores, top, total;
  std::vector<const float*> places;
};

// The weights of scores up to `count` in a line, of which `hidden` at the start and those from `unseen` on are not to be
// seen; what has been mixed by lower ones before is brought down to them.
void weigh_line(const Options& options, float* line, int64_t count, int64_t hidden, int64_t unseen, float& top,
                float& total, float* mixed, int64_t dim) {
  const int64_t padded = (count + kWidth - 1) / kWidth * kWidth;
  if (options.soft_cap > 0) {
    for (int64_t p = 0; p < count; ++p) line[p] = options.soft_cap * std::tanh(line[p] / options.soft_cap);
  }
  for (int64_t p = 0; p < std::min(hidden, count); ++p) line[p] = kMasked;
  for (int64_t p = std::min(count, unseen); p < padded; ++p) line[p] = kMasked;
  Vector highest = load(line);
  for (int64_t p = kWidth; p < padded; p += kWidth) {
    const Vector more = load(line + p);
    highest = more > highest ? more : highest;
  }
  float new_top = top;
  for (int i = 0; i < kWidth; ++i) new_top = std::max(new_top, highest[i]);
  Vector weight = {};
  for (int64_t p = 0; p < padded; p += kWidth) {
    const Vector value = exponential(load(line + p) - new_top);
    store(line + p, value);
    weight += value;
  }
  if (new_top > top) {
    const float kept = std::exp(top - new_top);
    total *= kept;
    for (int64_t d = 0; d < dim; ++d) mixed[d] *= kept;
  }
  total += sum(weight);
  top = new_top;
}

// Tokens `begin` to `end` of a step, of one sequence, the first at `position`; `cache` is their shard's, `table` their
// sequence's.
struct Tile {
  const float* cache;
  const int32_t* table;
  int64_t shard, begin, end, position;
  // The positions that are seen.
  int64_t first(const Options& options) const {
    return options.window > 0 ? std::max<int64_t>(0, position + 1 - options.window) : 0;
  }
  int64_t last() const { return position + end - begin; }
};

// Adds where the positions of a tile lie, up to `last`.
void add_places(const Shape& shape, const Tile& tile, int64_t first, int64_t last, std::vector<const float*>& places) {
  while (first < last) {
    const int64_t block = first / shape.block_size, stop = std::min(last, (block + 1) * shape.block_size);
    const float* from = tile.cache + (tile.table[block] * shape.block_size + first - block * shape.block_size) *
                                         shape.position_stride();
    for (; first < stop; ++first, from += shape.position_stride()) places.push_back(from);
  }
}

// The queries of KV heads `first_head` to `last_head` of a tile, in q and out [tokens, heads, dim] of its shard. `next`
// is the tile that this thread is likely to take then.
void attend(const Shape& shape, const Options& options, const float* q, const Tile& tile, const Tile& next,
            int64_t first_head, int64_t last_head, float* out) {
  const int64_t begin = tile.begin, end = tile.end, position = tile.position;
  thread_local Scratch scratch;
  const int64_t dim = shape.dim, shared = shape.shared(), rows = (end - begin) * shared;
  const int64_t lines = rows * (last_head - first_head);
  scratch.queries.resize(lines * dim), scratch.mixed.assign(lines * dim, 0.0f), scratch.scores.resize(rows * kChunk);
  scratch.top.assign(lines, kMasked), scratch.total.assign(lines, 0.0f);
  float *queries = scratch.queries.data(), *mixed = scratch.mixed.data(), *scores = scratch.scores.data();
  // Where a row's queries and its output are, in arrays [tokens, heads, dim].
  const auto at = [&](int64_t head, int64_t row) {
    return ((begin + row / shared) * shape.heads + head * shared + row % shared) * dim;
  };
  for (int64_t line = 0; line < lines; ++line) {
    const float* from = q + at(first_head + line / rows, line % rows);
    for (int64_t d = 0; d < dim; ++d) queries[line * dim + d] = from[d] * options.scale;
  }

  const int64_t seen = tile.last(), first = tile.first(options);
  auto& places = scratch.places;  // of what is seen, and then of what comes soon
  places.clear();
  add_places(shape, tile, first, seen, places);
  add_places(shape, next, next.first(options), std::min(next.first(options) + kSoon, next.last()), places);
  places.resize(seen - first + kWidth + kSoon, places.back());
  Soon soon = {places.data() + kSoon, &places.back(), 2 * first_head * dim, 2 * (last_head - first_head) * dim, 0};

  for (int64_t from = first; from < seen; from += kChunk) {
    const int64_t count = std::min(kChunk, seen - from), padded = (count + kWidth - 1) / kWidth * kWidth;
    // Rows before `skipped` see nothing of this chunk.
    const int64_t skipped = std::max<int64_t>(0, from - position) * shared;
    for (int64_t head = first_head; head < last_head; ++head) {
      const float* const* here = places.data() + from - first;
      const int64_t keys = 2 * head * dim, values = keys + dim, base = (head - first_head) * rows;
      for (int64_t row = skipped; row < rows; row += kTogether) {
        const int64_t group = std::min(kTogether, rows - row);
        for (int64_t p = 0; p < padded; p += 4) {
          kScore[group][row == skipped](queries + (base + row) * dim, here + p, keys, dim, scores + row * kChunk + p,
                                      soon);
        }
      }
      for (int64_t row = skipped; row < rows; ++row) {
        const int64_t own = position + row / shared, line = base + row;
        const int64_t hidden = options.window > 0 ? own + 1 - options.window - from : 0;
        weigh_line(options, scores + row * kChunk, count, hidden, own + 1 - from, scratch.top[line],
                   scratch.total[line], mixed + line * dim, dim);
      }
      for (int64_t row = skipped; row < rows; row += kTogether) {
        const int64_t group = std::min(kTogether, rows - row);
        kMix[group][row == skipped](scores + row * kChunk, here, values, count, dim, mixed + (base + row) * dim, soon);
      }
    }
  }
  for (int64_t line = 0; line < lines; ++line) {
    float* to = out + at(first_head + line / rows, line % rows);
    for (int64_t d = 0; d < dim; ++d) to[d] = mixed[line * dim + d] / scratch.total[line];
  }
}

// See executor/attention.py; all arrays have a leading axis of shards, and `kv` is changed in place.
ffi::Error attention(ffi::ThreadPool pool, float scale, float soft_cap, int64_t window, ffi::Buffer<ffi::F32> q,
                     ffi::Buffer<ffi::F32> k, ffi::Buffer<ffi::F32> v, ffi::Buffer<ffi::F32> kv,
                     ffi::Buffer<ffi::S32> positions, ffi::Buffer<ffi::S32> num_tokens, ffi::Buffer<ffi::S32> tables,
                     ffi::ResultBuffer<ffi::F32> out, ffi::ResultBuffer<ffi::F32> new_kv) {
  const auto q_shape = q.dimensions(), kv_shape = kv.dimensions(), table_shape = tables.dimensions();
  const int64_t shards = q_shape[0];
  const Shape shape = {q_shape[1],  q_shape[2],  kv_shape[3] / 2, q_shape[3],
                       kv_shape[1], kv_shape[2], table_shape[1],  table_shape[2]};
  const Options options = {scale, soft_cap, window};
  if (shape.dim % kWidth || shape.heads % shape.kv_heads || shape.shared() > 64) {
    return ffi::Error::InvalidArgument("these heads are not supported");
  }
  float* cache = new_kv->typed_data();
  if (cache != kv.typed_data()) std::memcpy(cache, kv.typed_data(), kv.size_bytes());

  const int64_t cache_size = shape.blocks * shape.block_size * shape.position_stride();
  std::vector<Tile> tiles;
  for (int64_t shard = 0; shard < shards; ++shard) {
    int64_t token = 0;
    for (int64_t sequence = 0; sequence < shape.sequences; ++sequence) {
      const int64_t place = shard * shape.sequences + sequence, count = num_tokens.typed_data()[place];
      const int64_t position = positions.typed_data()[place];
      for (int64_t done = 0; done < count; done += kTile) {
        const int64_t begin = token + done, end = token + std::min(count, done + kTile);
        tiles.push_back({cache + shard * cache_size, tables.typed_data() + place * shape.table, shard, begin, end,
                         position + done});
      }
      token += count;
    }
    float* rest = out->typed_data() + (shard * shape.tokens + token) * shape.heads * shape.dim;
    std::fill(rest, rest + (shape.tokens - token) * shape.heads * shape.dim, std::numeric_limits<float>::quiet_NaN());
  }

  const auto write = [&](const Tile& tile) {
    for (int64_t token = tile.begin; token < tile.end; ++token) {
      const int64_t at = tile.position + token - tile.begin;
      const int64_t place = tile.table[at / shape.block_size] * shape.block_size + at % shape.block_size;
      float* to = cache + tile.shard * cache_size + place * shape.position_stride();
      const int64_t from = (tile.shard * shape.tokens + token) * shape.kv_heads * shape.dim;
      for (int64_t head = 0; head < shape.kv_heads; ++head) {
        std::memcpy(to + 2 * head * shape.dim, k.typed_data() + from + head * shape.dim, shape.dim * sizeof(float));
        std::memcpy(to + (2 * head + 1) * shape.dim, v.typed_data() + from + head * shape.dim,
                    shape.dim * sizeof(float));
      }
    }
  };
  // All is written before anything is read: a tile sees what other tiles of its sequence write.
  for (const Tile& tile : tiles) write(tile);
  // All heads of a tile go through the cache together, as it lies, unless there are too few tiles for all threads.
  // Long sequences' last tiles see most; taking them first leaves short work for the end.
  const int64_t count = tiles.size();
  const int64_t parts = count < kTilesPerThread * pool.num_threads() ? shape.kv_heads : 1;
  in_parallel(pool, count * parts, [&](int64_t task) {
    const int64_t at = count - 1 - task / parts, part = task % parts;
    const Tile &tile = tiles[at], &next = tiles[std::max<int64_t>(0, at - 1)];
    const int64_t start = tile.shard * shape.tokens * shape.heads * shape.dim;
    attend(shape, options, q.typed_data() + start, tile, next, part * shape.kv_heads / parts,
           (part + 1) * shape.kv_heads / parts, out->typed_data() + start);
  });
  return ffi::Error::Success();
}

// Zeros, for a cache: in large pages where the system has them, since small ones take time to find.
ffi::Error zeros(ffi::ResultBuffer<ffi::F32> out) {
  constexpr uintptr_t kLarge = 2 << 20;
  void* memory = out->typed_data();
  const uintptr_t begin = reinterpret_cast<uintptr_t>(memory), end = begin + out->size_bytes();
  const uintptr_t first = (begin + kLarge - 1) / kLarge * kLarge, last = end / kLarge * kLarge;
#if defined(MADV_HUGEPAGE)
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
  std::memset(memory, 0, out->size_bytes());
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(rankbus_zeros, zeros, ffi::Ffi::Bind().Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    rankbus_products, products,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::Buffer<ffi::F32>>().RemainingArgs().RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(rankbus_gated, gated,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<bool>("gelu")
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(rankbus_attention, attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<int64_t>("window")
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
