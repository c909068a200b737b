// Convolutions on a CPU with weights of each lane's own: kernels of K by K, one pixel at a time.
//
// A vector holds neighbouring pixels of one channel, so few channels leave no part of it empty, and a
// window needs no copy: it is the same plane, read K*K times from places that are one pixel apart.
// Planes are copied with zeros around them, into memory that stays near, so nothing asks for edges.
//
// REAL is float or double. Lanes, images and pixels lie as in torch: [L, B, C, H, W], contiguous, and
// a lane's weights [F, C, K, K] lie together.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <vector>

#if defined(__AVX512F__)
#define BYTES 64
#define BESIDE 4  // Vectors of pixels that are summed up at a time: with BLOCK channels, in registers.
#elif defined(__AVX__)
#define BYTES 32
#define BESIDE 2
#else
#define BYTES 16
#define BESIDE 2
#endif

namespace {

using Integer = std::conditional_t<sizeof(REAL) == 4, std::int32_t, std::int64_t>;
typedef REAL Vector __attribute__((vector_size(BYTES)));
typedef REAL Loose __attribute__((vector_size(BYTES), aligned(sizeof(REAL)), may_alias));
typedef Integer Order __attribute__((vector_size(BYTES)));
constexpr long WIDE = BYTES / sizeof(REAL);
constexpr long TOGETHER = 4;  // Images that a thread takes at a time.

inline Vector load(const REAL* from) { return *reinterpret_cast<const Loose*>(from); }
inline void store(REAL* to, Vector v) { *reinterpret_cast<Loose*>(to) = v; }
inline long up(long n, long m) { return (n + m - 1) / m * m; }

// The sum of a vector's numbers: halves upon halves.
inline REAL total(Vector v) {
#pragma GCC unroll 8
  for (long n = WIDE / 2; n > 0; n /= 2) {
    Order turned;
    for (long i = 0; i < WIDE; i++) turned[i] = (i + n) % WIDE;
    v += __builtin_shuffle(v, turned);
  }
  return v[0];
}

// Images, and what becomes of them.
struct Sizes {
  long lanes, images, channels, height, width, filters, top, left, out_height, out_width;
};

// Where the pixels of a result lie in vectors: row by row where rows fill them, else as one line in
// which some numbers between rows mean nothing.
struct Plan {
  long height, width, pitch, plane, out_pitch, count;
  std::vector<long> starts;  // Of each vector, where its first window begins in a plane.

  Plan(long height, long width) : height(height), width(width) {
    const long per_row = up(width, WIDE) / WIDE, line = width + K - 1;
    const long in_line = up(height * line, WIDE) / WIDE;
    const bool rows = height * per_row <= in_line;
    pitch = rows ? per_row * WIDE + K - 1 : line;
    out_pitch = rows ? per_row * WIDE : line;
    count = rows ? height * per_row : in_line;
    plane = up((height + K - 1) * pitch + WIDE + K, WIDE);
    starts.resize(count + BESIDE + 1);  // The last few again, to fill up a group.
    for (long v = 0; v < (long)starts.size(); v++) {
      const long w = std::min(v, count - 1);
      starts[v] = rows ? w / per_row * pitch + w % per_row * WIDE : w * WIDE;
    }
  }
};

// Memory of a thread.
struct Space {
  REAL* numbers;
  explicit Space(long count)
      : numbers(static_cast<REAL*>(std::aligned_alloc(64, up(count * sizeof(REAL), 64)))) {
    if (!numbers) std::abort();
  }
  Space(const Space&) = delete;
  ~Space() { std::free(numbers); }
};

// The planes of an image, with zeros around them.
void surround(const REAL* image, long channels, long height, long width, long top, long left,
              const Plan& plan, REAL* out) {
  for (long c = 0; c < channels; c++) {
    REAL* to = out + c * plan.plane;
    std::fill_n(to, top * plan.pitch, REAL(0));
    for (long y = 0; y < height; y++) {
      REAL* row = to + (y + top) * plan.pitch;
      std::fill_n(row, left, REAL(0));
      std::memcpy(row + left, image + (c * height + y) * width, sizeof(REAL) * width);
      std::fill_n(row + left + width, plan.pitch - left - width, REAL(0));
    }
    const long used = (height + top) * plan.pitch;
    std::fill_n(to + used, plan.plane - used, REAL(0));
  }
}

// BLOCK channels of N vectors of pixels: weights [C][K][K][filters], results `apart` numbers apart.
template <int BLOCK, int N>
inline void convolve_block(const REAL* planes, long channels, const Plan& plan, const long* starts,
                           const REAL* weights, long filters, const REAL* bias, REAL* out,
                           long apart) {
  Vector sums[BLOCK][N];
  const REAL* from[N];
#pragma GCC unroll 16
  for (int v = 0; v < N; v++) from[v] = planes + starts[v];
#pragma GCC unroll 16
  for (int f = 0; f < BLOCK; f++)
#pragma GCC unroll 16
    for (int v = 0; v < N; v++) sums[f][v] = Vector{} + bias[f];
  for (long c = 0; c < channels; c++)
    for (long ky = 0; ky < K; ky++) {
      const long shift = c * plan.plane + ky * plan.pitch;
#pragma GCC unroll 16
      for (int kx = 0; kx < K; kx++) {
        Vector pixels[N];
#pragma GCC unroll 16
        for (int v = 0; v < N; v++) pixels[v] = load(from[v] + shift + kx);
#pragma GCC unroll 16
        for (int f = 0; f < BLOCK; f++)
#pragma GCC unroll 16
          for (int v = 0; v < N; v++) sums[f][v] += pixels[v] * weights[f];
        weights += filters;
      }
    }
#pragma GCC unroll 16
  for (int f = 0; f < BLOCK; f++)
#pragma GCC unroll 16
    for (int v = 0; v < N; v++) store(out + f * apart + v * WIDE, sums[f][v]);
}

// All results of an image; `filters` of the weights are a multiple of BLOCK, of the results `real`.
template <int BLOCK>
void convolve_image(const REAL* planes, long channels, const Plan& plan, const REAL* weights,
                    long filters, long real, const REAL* bias, REAL* out, REAL* block) {
  constexpr int N = BLOCK == 5 ? BESIDE : BESIDE + (BESIDE > 2);
  const long apart = up(plan.count, N) * WIDE;
  for (long first = 0; first < filters; first += BLOCK) {
    for (long v = 0; v < plan.count; v += N)
      convolve_block<BLOCK, N>(planes, channels, plan, &plan.starts[v], weights + first, filters,
                               bias + first, block + v * WIDE, apart);
    for (long f = first; f < std::min(first + BLOCK, real); f++)
      for (long y = 0; y < plan.height; y++)
        std::memcpy(out + (f * plan.height + y) * plan.width,
                    block + (f - first) * apart + y * plan.out_pitch, sizeof(REAL) * plan.width);
  }
}

// Blocks of five channels, or of four where these leave fewer unused.
long block_of(long channels) { return up(channels, 5) <= up(channels, 4) ? 5 : 4; }

// Results [L, B, F, OH, OW]; `turned`, weights are [L, C, F, K, K], the last tap first.
void convolve(const REAL* x, const REAL* w, const REAL* bias, REAL* out, const Sizes& s, long w_apart,
              long bias_apart, bool turned, int threads) {
  const Plan plan(s.out_height, s.out_width);
  const long block = block_of(s.filters), filters = up(s.filters, block);
  const long parts = up(s.images, TOGETHER) / TOGETHER;
#pragma omp parallel num_threads(threads)
  {
    Space planes(s.channels * plan.plane), results(5 * (plan.count + BESIDE + 1) * WIDE);
    Space weights(s.channels * K * K * filters), biases(filters);
#pragma omp for schedule(static)
    for (long item = 0; item < s.lanes * parts; item++) {
      const long lane = item / parts, first = item % parts * TOGETHER;
      const REAL* own = w + lane * w_apart;
      REAL* next = weights.numbers;
      for (long c = 0; c < s.channels; c++)
        for (long tap = 0; tap < K * K; tap++)
          for (long f = 0; f < filters; f++)
            *next++ = f >= s.filters ? 0
                      : turned       ? own[(c * s.filters + f) * K * K + K * K - 1 - tap]
                                     : own[(f * s.channels + c) * K * K + tap];
      for (long f = 0; f < filters; f++)
        biases.numbers[f] = bias && f < s.filters ? bias[lane * bias_apart + f] : 0;
      for (long i = first; i < std::min(s.images, first + TOGETHER); i++) {
        const long image = lane * s.images + i;
        surround(x + image * s.channels * s.height * s.width, s.channels, s.height, s.width, s.top,
                 s.left, plan, planes.numbers);
        const auto all = block == 5 ? convolve_image<5> : convolve_image<4>;
        all(planes.numbers, s.channels, plan, weights.numbers, filters, s.filters, biases.numbers,
            out + image * s.filters * plan.height * plan.width, results.numbers);
      }
    }
  }
}

// Adds some images' share of the gradients of BLOCK channels' weights, [real][C][K][K].
template <int BLOCK>
void correlate_images(const REAL* planes, const REAL* gradients, long images, long channels,
                      const Plan& plan, long real, REAL* out) {
  const long gradient = plan.count * WIDE;
  for (long c = 0; c < channels; c++)
    for (long ky = 0; ky < K; ky++) {
      Vector sums[BLOCK][K];
#pragma GCC unroll 16
      for (int f = 0; f < BLOCK; f++)
#pragma GCC unroll 16
        for (int kx = 0; kx < K; kx++) sums[f][kx] = Vector{};
      for (long i = 0; i < images; i++) {
        const REAL* from = planes + (i * channels + c) * plan.plane + ky * plan.pitch;
        const REAL* by = gradients + i * BLOCK * gradient;
        for (long v = 0; v < plan.count; v++) {
          Vector pixels[K];
#pragma GCC unroll 16
          for (int kx = 0; kx < K; kx++) pixels[kx] = load(from + plan.starts[v] + kx);
#pragma GCC unroll 16
          for (int f = 0; f < BLOCK; f++) {
            const Vector factor = load(by + f * gradient + v * WIDE);
#pragma GCC unroll 16
            for (int kx = 0; kx < K; kx++) sums[f][kx] += pixels[kx] * factor;
          }
        }
      }
#pragma GCC unroll 16
      for (int f = 0; f < BLOCK; f++)
        if (f < real)
#pragma GCC unroll 16
          for (int kx = 0; kx < K; kx++)
            out[((f * channels + c) * K + ky) * K + kx] += total(sums[f][kx]);
    }
}

// The gradients of weights [L, F, C, K, K] and biases [L, F].
void correlate(const REAL* x, const REAL* g, REAL* weights, REAL* biases, const Sizes& s,
               int threads) {
  const Plan plan(s.out_height, s.out_width);
  const long block = block_of(s.filters), parts = up(s.filters, block) / block;
  const long pixels = s.out_height * s.out_width, gradient = plan.count * WIDE;
  const long taps = s.channels * K * K;
#pragma omp parallel num_threads(threads)
  {
    Space planes(TOGETHER * s.channels * plan.plane), gradients(TOGETHER * block * gradient);
#pragma omp for schedule(static)
    for (long item = 0; item < s.lanes * parts; item++) {
      const long lane = item / parts, begin = item % parts * block;
      const long real = std::min(block, s.filters - begin);
      REAL* sums = biases + lane * s.filters + begin;
      REAL* out = weights + (lane * s.filters + begin) * taps;
      std::fill_n(sums, real, REAL(0));
      std::fill_n(out, real * taps, REAL(0));
      // What is between rows, and channels that only fill up, stays zero.
      std::fill_n(gradients.numbers, TOGETHER * block * gradient, REAL(0));
      for (long first = 0; first < s.images; first += TOGETHER) {
        const long count = std::min(TOGETHER, s.images - first);
        for (long i = 0; i < count; i++) {
          const long image = lane * s.images + first + i;
          surround(x + image * s.channels * s.height * s.width, s.channels, s.height, s.width, s.top,
                   s.left, plan, planes.numbers + i * s.channels * plan.plane);
          for (long f = 0; f < real; f++) {
            REAL* to = gradients.numbers + (i * block + f) * gradient;
            const REAL* from = g + (image * s.filters + begin + f) * pixels;
            for (long y = 0; y < s.out_height; y++)
              std::memcpy(to + y * plan.out_pitch, from + y * s.out_width,
                          sizeof(REAL) * s.out_width);
            Vector sum = {};
            for (long v = 0; v < plan.count; v++) sum += load(to + v * WIDE);
            sums[f] += total(sum);
          }
        }
        const auto add = block == 5 ? correlate_images<5> : correlate_images<4>;
        add(planes.numbers, gradients.numbers, count, s.channels, plan, real, out);
      }
    }
  }
}

}  // namespace

extern "C" void fmol_convolve(const REAL* x, const REAL* w, const REAL* bias, REAL* out,
                              const Sizes* sizes, long w_apart, long bias_apart, int turned,
                              int threads) {
  convolve(x, w, bias, out, *sizes, w_apart, bias_apart, turned, threads);
}

extern "C" void fmol_correlate(const REAL* x, const REAL* g, REAL* weights, REAL* biases,
                               const Sizes* sizes, int threads) {
  correlate(x, g, weights, biases, *sizes, threads);
}
