// Inner products of all pairs of S long vectors, in one pass over them, on tensor cores that compute in
// double precision.
//
// part[w, t, i, j] = Σ_k rows[16 · a_t + i, k] · rows[8 · c_t + j, k] over the columns of warp w, for each
// pair t of sixteen rows and of eight that are not before them. Compiled for one shape at a time: all
// names in capitals are numbers that stand before this text (see gram.py).
//
// A product is of 16 × 4 by 4 × 8 numbers, shared out among a warp. Of its 32 threads, with `group` of
// eight and `member` of four in each, one has of the left side rows group and group + 8 in column member,
// of the right side row member in column group, and of the sum columns 2 · member and the next in rows
// group and group + 8. As the right side are rows as well, turned, a thread's number of eight rows is the
// same on both sides: it is read once, and nothing goes through shared memory. Which columns of the
// vectors are which of a product is free: a thread has four beside each other.

struct alignas(16) Four {
  float v[4];
};

constexpr int GROUPS = (S + 7) / 8, PAIRS = (GROUPS + 1) / 2;
constexpr int TILES = PAIRS * GROUPS - PAIRS * (PAIRS - 1);

#ifdef __CUDACC__
__device__ inline void add_product(double* sum, double top, double bottom, double right) {
#if __CUDA_ARCH__ >= 900
  asm("mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+d"(sum[0]), "+d"(sum[1]), "+d"(sum[2]), "+d"(sum[3])
      : "d"(top), "d"(bottom), "d"(right));
#else
  asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
      : "+d"(sum[0]), "+d"(sum[1])
      : "d"(top), "d"(right));
  asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
      : "+d"(sum[2]), "+d"(sum[3])
      : "d"(bottom), "d"(right));
#endif
}
#endif

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
    gram(const float* __restrict__ rows, double* __restrict__ part, int columns, int turns) {
  const int t = threadIdx.x, warp = t / 32, group = t % 32 / 4, member = t % 4;
  double sum[TILES][4];
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[tile][i] = 0.;

  Four next[RUNS][GROUPS];
  auto fetch = [&](long long turn) {
#pragma unroll
    for (int run = 0; run < RUNS; ++run) {
      const long long at = ((turn * WARPS + warp) * RUNS + run) * 16 + 4 * member;
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) {
        const int row = 8 * g + group;
        next[run][g] = Four{{0.f, 0.f, 0.f, 0.f}};
        if (S % 8 && row >= S) continue;
        const float* from = rows + (long long)row * columns + at;
#if ALIGNED
        if (at < columns) next[run][g] = *reinterpret_cast<const Four*>(from);
#else
#pragma unroll
        for (int k = 0; k < 4; ++k)
          if (at + k < columns) next[run][g].v[k] = from[k];
#endif
      }
    }
  };

  const long long first = (long long)blockIdx.x * turns;
  fetch(first);
#pragma unroll 1
  for (long long turn = first; turn < first + turns; ++turn) {
    Four now[RUNS][GROUPS];
#pragma unroll
    for (int run = 0; run < RUNS; ++run)
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) now[run][g] = next[run][g];
    if (turn + 1 < first + turns) fetch(turn + 1);
#pragma unroll
    for (int run = 0; run < RUNS; ++run)
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        double mine[2 * PAIRS];
#pragma unroll
        for (int g = 0; g < 2 * PAIRS; ++g) mine[g] = g < GROUPS ? now[run][g].v[k] : 0.;
        int tile = 0;
#pragma unroll
        for (int a = 0; a < PAIRS; ++a)
#pragma unroll
          for (int c = 2 * a; c < GROUPS; ++c)
            add_product(sum[tile++], mine[2 * a], mine[2 * a + 1], mine[c]);
      }
  }

  part += ((long long)blockIdx.x * WARPS + warp) * (TILES * 128) + group * 8 + 2 * member;
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
    for (int i = 0; i < 4; ++i) part[tile * 128 + i / 2 * 64 + i % 2] = sum[tile][i];
}
