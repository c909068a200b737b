// Inner products of all pairs of S long vectors, in one pass over them.
//
// part[b, p, i, j] = Σ_k rows[SIDE · a_p + i, k] · rows[SIDE · c_p + j, k] over the columns of block b,
// for each pair a_p ≤ c_p of groups of SIDE rows. Compiled for one shape at a time: all names in
// capitals are numbers that stand before this text (see gram.py).
//
// A thread has one pair of groups and every SLICES-th four columns. It adds up at most LONGEST products
// in single precision; beyond that sums are in double precision.

struct alignas(16) Four {
  float v[4];
};

constexpr int GROUPS = (S + SIDE - 1) / SIDE, PAIRS = GROUPS * (GROUPS + 1) / 2;
constexpr int THREADS = PAIRS * SLICES, COLUMNS = 4 * SLICES * TURNS;
// Rows of a group, and the same rows of neighbouring groups, are in different banks.
constexpr int STRIDE = COLUMNS / 4 % 2 ? COLUMNS : COLUMNS + 4, SKEW = SIDE % 2 ? 0 : 4;
constexpr int QUADS = GROUPS * SIDE * (COLUMNS / 4), EACH = (QUADS + THREADS - 1) / THREADS;

extern "C" __global__ void __launch_bounds__(THREADS)
    gram(const float* __restrict__ rows, double* __restrict__ part, int columns, int stages) {
  alignas(16) __shared__ float staged[GROUPS * (SIDE * STRIDE + SKEW)];
  __shared__ double whole[PAIRS * SIDE * SIDE];
  const int t = threadIdx.x, pair = t % PAIRS, slice = t / PAIRS;
  int a = 0, c = pair;
  while (c >= GROUPS - a) c -= GROUPS - a++;
  c += a;
  for (int e = t; e < PAIRS * SIDE * SIDE; e += THREADS) whole[e] = 0.;

  float sum[SIDE][SIDE];
#pragma unroll
  for (int i = 0; i < SIDE; ++i)
#pragma unroll
    for (int j = 0; j < SIDE; ++j) sum[i][j] = 0.f;

  Four next[EACH];
  // The quadruples that this thread brings to the block's next columns.
  auto fetch = [&](long long start) {
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      const int e = t + n * THREADS, q = e % (COLUMNS / 4), row = e / (COLUMNS / 4);
      const long long at = start + 4 * q;
      next[n] = Four{{0.f, 0.f, 0.f, 0.f}};
      if (e >= QUADS || row >= S) continue;
      const float* from = rows + (long long)row * columns + at;
#if ALIGNED
      if (at < columns) next[n] = *reinterpret_cast<const Four*>(from);
#else
#pragma unroll
      for (int k = 0; k < 4; ++k)
        if (at + k < columns) next[n].v[k] = from[k];
#endif
    }
  };

  const int first = blockIdx.x * stages;
  int added = 0;
  fetch((long long)first * COLUMNS);
  for (int stage = first; stage < first + stages; ++stage) {
    __syncthreads();
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      const int e = t + n * THREADS, q = e % (COLUMNS / 4), row = e / (COLUMNS / 4);
      if (e < QUADS)
        *reinterpret_cast<Four*>(staged + row * STRIDE + row / SIDE * SKEW + 4 * q) = next[n];
    }
    __syncthreads();
    if (stage + 1 < first + stages) fetch((long long)(stage + 1) * COLUMNS);
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
      const int at = 4 * (turn * SLICES + slice);
      const float* mine = staged + a * (SIDE * STRIDE + SKEW) + at;
      const float* other = staged + c * (SIDE * STRIDE + SKEW) + at;
      Four left[SIDE];
#pragma unroll
      for (int i = 0; i < SIDE; ++i)
        left[i] = *reinterpret_cast<const Four*>(mine + i * STRIDE);
#pragma unroll
      for (int j = 0; j < SIDE; ++j) {
        const Four right = *reinterpret_cast<const Four*>(other + j * STRIDE);
#pragma unroll
        for (int i = 0; i < SIDE; ++i)
#pragma unroll
          for (int k = 0; k < 4; ++k) sum[i][j] += left[i].v[k] * right.v[k];
      }
    }
    added += 4 * TURNS;
    if (added + 4 * TURNS > LONGEST || stage + 1 == first + stages) {
      added = 0;
      for (int turn = 0; turn < SLICES; ++turn) {  // In order, so that it comes to the same each time.
        __syncthreads();
        if (turn != slice) continue;
#pragma unroll
        for (int i = 0; i < SIDE; ++i)
#pragma unroll
          for (int j = 0; j < SIDE; ++j) {
            whole[(pair * SIDE + i) * SIDE + j] += sum[i][j];
            sum[i][j] = 0.f;
          }
      }
    }
  }
  __syncthreads();
  part += (long long)blockIdx.x * PAIRS * SIDE * SIDE;
  for (int e = t; e < PAIRS * SIDE * SIDE; e += THREADS) part[e] = whole[e];
}
