// Ragged paged attention on the CPU: a call, cut into tiles for the threads; the idea is told in cpu.h.

#include <vector>

#include "cpu.h"
#include "xla/ffi/api/ffi.h"

namespace jaxserve::attention {
namespace {

namespace ffi = xla::ffi;

constexpr int kTilesAThread = 8;

// ---- states ------------------------------------------------------------------------------------

void Clear(const State& state, int64_t M, int64_t depth) {
  for (int64_t m = 0; m < M; ++m) {
    state.max[m] = kNone;
    state.sum[m] = 0;
  }
  std::memset(state.value, 0, M * depth * sizeof(float));
}

// total = total joined with state, for M query vectors.
struct JoinOp {
  using Signature = void(const State& total, const State& state, int64_t M, int64_t depth);
  template <Isa>
  static JAXSERVE_INLINE void Run(const State& total, const State& state, int64_t M,
                                  int64_t depth) {
    for (int64_t m = 0; m < M; ++m) {
      float top = std::max(total.max[m], state.max[m]);
      float keep = Exp(Fill(total.max[m] - top))[0], add = Exp(Fill(state.max[m] - top))[0];
      total.max[m] = top;
      total.sum[m] = total.sum[m] * keep + state.sum[m] * add;
      for (int64_t e = 0; e < depth; e += kLanes) {
        float* at = total.value + m * depth + e;
        StoreLanes(at, LoadLanes(at) * keep + LoadLanes(state.value + m * depth + e) * add);
      }
    }
  }
};

// What a query's vector comes to: its value over its sum, [E] of float or BFloat16 from [depth]. One that
// saw nothing is zero; one whose sum is no number is none, though its value may be.
template <typename Number>
struct OutputOp {
  using Signature = void(const float* value, float sum, int64_t E, Number* out);
  template <Isa>
  static JAXSERVE_INLINE void Run(const float* value, float sum, int64_t E, Number* out) {
    Lanes over = Fill(sum == 0 ? 1 : sum);
    for (int64_t e = 0; e < E; e += kLanes) StoreSome(out + e, LoadLanes(value + e) / over, E - e);
  }
};

template <typename Op>
auto Entry(Isa isa) {
  return PerIsa<Op, typename Op::Signature>::For(isa);
}

// ---- a tile ------------------------------------------------------------------------------------

// What the joining starts from: nothing, or the sinks, which have weight and no value.
template <typename KV>
void StartTotal(const Call<KV>& call, const Tile& tile, const State& total) {
  int64_t M = tile.count * call.group();
  Clear(total, M, call.depth());
  if (call.sinks_H == nullptr) return;
  for (int64_t m = 0; m < M; ++m) {
    total.max[m] = call.sinks_H[tile.j * call.group() + m % call.group()];
    total.sum[m] = 1;
  }
}

template <typename KV>
void WriteOutput(const Call<KV>& call, const Tile& tile, const State& total) {
  for (int64_t m = 0; m < tile.count * call.group(); ++m) {
    auto write = [&](auto* out) {
      using Number = std::remove_pointer_t<decltype(out)>;
      Entry<OutputOp<Number>>(call.isa)(total.value + m * call.depth(), total.sum[m], call.E,
                                        out + call.QueryAt(tile, m));
    };
    if (call.bfloat16) {
      write(static_cast<BFloat16*>(call.out_THE));
    } else {
      write(static_cast<float*>(call.out_THE));
    }
  }
}

template <typename KV>
void AttendTile(const Call<KV>& call, const Way<KV>& way, const Tile& tile, const Tile& after,
                float* scratch, float* states) {
  int64_t depth = call.depth(), M = tile.count * call.group();
  State total = State::At(scratch, M, depth);
  State state = State::At(scratch + State::Floats(M, depth), M, depth);
  float* memory = scratch + 2 * State::Floats(M, depth);
  way.start(call, tile, memory);
  if (tile.state >= 0) {
    state = State::At(states + tile.state, M, depth);
    Clear(state, M, depth);
    return way.attend(call, tile, tile.segment0, after, memory, state);
  }
  StartTotal(call, tile, total);
  for (int64_t segment = tile.segment0; segment < tile.segment1; ++segment) {
    Clear(state, M, depth);
    way.attend(call, tile, segment, after, memory, state);
    Entry<JoinOp>(call.isa)(total, state, M, depth);
  }
  WriteOutput(call, tile, total);
}

// Joins the segments of a tile that were computed apart.
template <typename KV>
void JoinTile(const Call<KV>& call, const Tile& tile, float* scratch, float* states) {
  int64_t depth = call.depth(), M = tile.count * call.group();
  State total = State::At(scratch, M, depth);
  StartTotal(call, tile, total);
  for (int64_t i = 0; i < tile.segment1 - tile.segment0; ++i) {
    int64_t at = tile.state + i * State::Floats(M, depth);
    Entry<JoinOp>(call.isa)(total, State::At(states + at, M, depth), M, depth);
  }
  WriteOutput(call, tile, total);
}

// ---- a call ------------------------------------------------------------------------------------

// Null if lengths, pages and tokens fit the arrays they point into: a wrong one would write anywhere.
template <typename KV>
const char* Check(const Call<KV>& call) {
  if (call.num_rows < 0 || call.num_rows > call.S) return "num_rows beyond the table";
  if (call.cu_q_len_S1[0] != 0) return "cu_q_len does not start at 0";
  for (int64_t s = 0; s < call.num_rows; ++s) {
    int64_t length = call.kv_len_S[s], tokens = call.Tokens(s);
    if (tokens < 0 || call.cu_q_len_S1[s + 1] > call.T) return "cu_q_len beyond the tokens";
    if (length < tokens || length > call.P * call.K) return "kv_len beyond the pages, or too short";
    for (int64_t p = call.FirstVisible(length - tokens) / call.K; p * call.K < length; ++p) {
      int32_t page = call.page_table_SP[s * call.P + p];
      if (tokens > 0 && (page < 0 || page >= call.G)) return "page id beyond the cache";
    }
  }
  return nullptr;
}

struct Plan {
  std::vector<Tile> tiles;  // one per task
  std::vector<Tile> split;  // tiles whose segments are tasks of their own
  int64_t state_floats = 0, max_vectors = 0;
};

// Tiles with the most keys first, so that the threads finish together.
template <typename KV>
Plan MakePlan(const Call<KV>& call, int64_t most_vectors) {
  Plan plan;
  // Large tiles share the work on a block's keys, small ones the work among threads.
  int64_t vectors = call.cu_q_len_S1[call.num_rows] * call.H / (kTilesAThread * NumThreads());
  vectors = std::max<int64_t>(kFewestVectors, std::min<int64_t>(vectors, most_vectors));
  int64_t tile_tokens = std::max<int64_t>(1, vectors / call.group());
  for (int64_t s = 0; s < call.num_rows; ++s) {
    int64_t end = call.cu_q_len_S1[s + 1], first = call.cu_q_len_S1[s];
    for (int64_t t0 = first; t0 < end; t0 += tile_tokens) {
      int64_t count = std::min(tile_tokens, end - t0), M = count * call.group();
      int64_t position = call.FirstPosition(s) + t0 - first;
      int64_t segment0 = call.FirstVisible(position) / kSegment;
      int64_t segment1 = CeilDiv(position + count, kSegment);
      plan.max_vectors = std::max(plan.max_vectors, M);
      for (int64_t j = 0; j < call.J; ++j) {
        Tile tile{s, j, t0, count, segment0, segment1, -1};
        if (end - first > 1 || segment1 - segment0 == 1) {
          plan.tiles.push_back(tile);
          continue;
        }
        tile.state = plan.state_floats;
        plan.split.push_back(tile);
        for (int64_t i = segment0; i < segment1; ++i) {
          plan.tiles.push_back({s, j, t0, count, i, i + 1, plan.state_floats});
          plan.state_floats += State::Floats(M, call.depth());
        }
      }
    }
  }
  std::stable_sort(plan.tiles.begin(), plan.tiles.end(), [](const Tile& a, const Tile& b) {
    return (a.segment1 - a.segment0) * a.count > (b.segment1 - b.segment0) * b.count;
  });
  return plan;
}

// Products of bytes and of bfloat16 where they can be had: a query's way must not depend on its mates.
template <typename KV>
Way<KV> ChooseWay(const Call<KV>& call) {
  const bool whole = call.lanes() == kLanes;
  if constexpr (std::is_same_v<KV, BFloat16>) {
    if (call.isa >= Isa::kAvx512Bf16 && whole && call.bfloat16 && call.E % 2 == 0) return ByTiles(call.isa);
  }
  if constexpr (std::is_same_v<KV, int8_t>) {
    if (call.isa >= Isa::kAvx512Vbmi && whole && call.E <= kLongestCodes) return ByCodes(call.isa);
  }
  return ByLanes<KV>();
}

template <typename KV>
void Attend(const Call<KV>& call) {
  Team team;
  WriteChunks(call, team);
  int64_t used = call.cu_q_len_S1[call.num_rows] * call.H * call.E, all = call.T * call.H * call.E;
  size_t size = call.bfloat16 ? sizeof(BFloat16) : sizeof(float);
  std::memset(static_cast<char*>(call.out_THE) + used * size, 0, (all - used) * size);

  const Way<KV> way = ChooseWay(call);
  Plan plan = MakePlan(call, way.most_vectors);
  int64_t M = plan.max_vectors;
  size_t thread_bytes = (2 * State::Floats(M, call.depth()) + way.floats(call, M)) * sizeof(float);
  int64_t thread_floats = Align64(thread_bytes) / sizeof(float);
  float* scratch = team.Scratch<float>(thread_floats * NumThreads() + plan.state_floats);
  float* states = scratch + thread_floats * NumThreads();
  const int64_t tiles = plan.tiles.size();
  // A row's heads lie side by side in its pages: where tiles abound, a thread takes them together.
  const int64_t together = tiles >= kTilesAThread * NumThreads() * call.J ? call.J : 1;
  team.ForEach(CeilDiv(tiles, together), [&](int64_t task, int thread) {
    const int64_t end = std::min(tiles, (task + 1) * together);
    for (int64_t i = task * together; i < end; ++i) {
      // The one that this thread is likely to take next.
      const int64_t after = i + 1 < end ? i + 1 : i + 1 + (NumThreads() - 1) * together;
      AttendTile(call, way, plan.tiles[i], plan.tiles[std::min(after, tiles - 1)],
                 scratch + thread * thread_floats, states);
    }
  });
  team.ForEach(plan.split.size(), [&](int64_t task, int thread) {
    JoinTile(call, plan.split[task], scratch + thread * thread_floats, states);
  });
}

using IntBuffer = ffi::Buffer<ffi::S32>;

// q [T, H, E], k, v [T, J, E] and the output: all bfloat16 or all float32; pages [L, G, J, 2, K, E] and,
// where they hold codes, scales [L, G, J, 2, K]; sinks [H] or empty. The second and third result are
// `pages` and `scales`, written in place.
ffi::Error RaggedAttention(ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                           ffi::AnyBuffer pages, ffi::Buffer<ffi::F32> scales,
                           IntBuffer page_table, IntBuffer kv_len, IntBuffer cu_q_len,
                           IntBuffer num_rows, IntBuffer layer, ffi::Buffer<ffi::F32> sinks,
                           ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> new_pages,
                           ffi::ResultBuffer<ffi::F32> new_scales, float scale, float soft_cap,
                           int64_t window, int64_t isa) {
  auto dims = pages.dimensions();
  int64_t L = dims[0], index = layer.typed_data()[0];
  const auto kind = q.element_type();
  if (kind != ffi::F32 && kind != ffi::BF16) {
    return ffi::Error::InvalidArgument("attention: q is neither float32 nor bfloat16");
  }
  if (k.element_type() != kind || v.element_type() != kind || out->element_type() != kind) {
    return ffi::Error::InvalidArgument("attention: q, k, v and the output differ in type");
  }
  if (index < 0 || index >= L) return ffi::Error::InvalidArgument("attention: no such layer");
  if (new_pages->untyped_data() != pages.untyped_data() ||
      new_scales->untyped_data() != scales.untyped_data()) {
    return ffi::Error::Internal("attention: the cache is not updated in place");
  }
  auto run = [&](auto type) {
    using KV = decltype(type);
    Call<KV> call{};
    call.T = q.dimensions()[0];
    call.H = q.dimensions()[1];
    call.E = q.dimensions()[2];
    call.J = k.dimensions()[1];
    call.S = page_table.dimensions()[0];
    call.P = page_table.dimensions()[1];
    call.G = dims[1];
    call.K = dims[4];
    call.q_THE = q.untyped_data();
    call.out_THE = out->untyped_data();
    call.bfloat16 = kind == ffi::BF16;
    call.k_TJE = k.untyped_data();
    call.v_TJE = v.untyped_data();
    call.pages = static_cast<KV*>(pages.untyped_data()) + pages.element_count() / L * index;
    call.scales = kCodes<KV> ? scales.typed_data() + scales.element_count() / L * index : nullptr;
    call.page_table_SP = page_table.typed_data();
    call.kv_len_S = kv_len.typed_data();
    call.cu_q_len_S1 = cu_q_len.typed_data();
    call.num_rows = num_rows.typed_data()[0];
    call.sinks_H = sinks.element_count() > 0 ? sinks.typed_data() : nullptr;
    call.scale = scale;
    call.soft_cap = soft_cap;
    call.window = window;
    call.isa = ChooseIsa(isa);
    if (const char* wrong = Check(call)) {
      return ffi::Error::InvalidArgument(std::string("attention: ") + wrong);
    }
    Attend(call);
    return ffi::Error::Success();
  };
  switch (pages.element_type()) {
    case ffi::F32: return run(float{});
    case ffi::BF16: return run(BFloat16{});
    case ffi::S16: return run(int16_t{});
    case ffi::S8: return run(int8_t{});
    case ffi::F8E4M3FN: return run(Float8{});
    default: return ffi::Error::InvalidArgument("attention: unknown KV dtype");
  }
}

}  // namespace
}  // namespace jaxserve::attention

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_ragged_attention, jaxserve::attention::RaggedAttention,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::AnyBuffer>()              // q
                                  .Arg<xla::ffi::AnyBuffer>()              // k
                                  .Arg<xla::ffi::AnyBuffer>()              // v
                                  .Arg<xla::ffi::AnyBuffer>()              // pages
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()  // scales
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()  // page_table
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()  // kv_len
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()  // cu_q_len
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()  // num_rows
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()  // layer
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()  // sinks
                                  .Ret<xla::ffi::AnyBuffer>()              // out
                                  .Ret<xla::ffi::AnyBuffer>()              // pages
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()  // scales
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("isa"));
