// The largest of every 2 by 2 pixels, on a CPU, for planes [P, H, W] that lie one after the other.
//
// A library keeps a place of eight bytes for every result, and looks at windows one by one where
// channels do not come last. Here it is a byte, and as many windows at a time as a vector holds.
// REAL is float or double. As in torch, the first of equals counts, and what is no number wins.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX__)
#define BYTES 32
#else
#define BYTES 16
#endif

namespace {

using Integer = std::conditional_t<sizeof(REAL) == 4, std::int32_t, std::int64_t>;
constexpr long WIDE = BYTES / sizeof(REAL);
typedef REAL Vector __attribute__((vector_size(BYTES)));
typedef REAL Loose __attribute__((vector_size(BYTES), aligned(sizeof(REAL)), may_alias));
typedef Integer Order __attribute__((vector_size(BYTES)));
typedef std::uint8_t Bytes __attribute__((vector_size(WIDE)));

inline Vector load(const REAL* from) { return *reinterpret_cast<const Loose*>(from); }
inline void store(REAL* to, Vector v) { *reinterpret_cast<Loose*>(to) = v; }

// Which numbers of two vectors in a row: `first`, `first` + `step`, ...
inline Order every(long first, long step) {
  Order found;
  for (long i = 0; i < WIDE; i++) found[i] = first + i * step;
  return found;
}

// One number of either vector in turn, from number `first` on.
inline Order in_turn(long first) {
  Order found;
  for (long i = 0; i < WIDE; i++) found[i] = first + i / 2 + i % 2 * WIDE;
  return found;
}

inline void choose(Vector& best, Order& place, Vector next, Integer at) {
  const Order larger = (next > best) | (next != next);
  best = larger ? next : best;
  place = larger ? Order{} + at : place;
}

// The largest of two rows' windows, as many as a vector holds, and which of the four it is.
inline Vector pool(const REAL* top, const REAL* bottom, Bytes& places) {
  const Order even = every(0, 2), odd = every(1, 2);
  Vector best = {};
  Order place = {};
  for (Integer k = 0; k < 2; k++) {
    const REAL* from = k ? bottom : top;
    const Vector a = load(from), b = load(from + WIDE);
    if (k)
      choose(best, place, __builtin_shuffle(a, b, even), 2);
    else
      best = __builtin_shuffle(a, b, even);
    choose(best, place, __builtin_shuffle(a, b, odd), 2 * k + 1);
  }
  places = __builtin_convertvector(place, Bytes);
  return best;
}

void pool_row(const REAL* top, const REAL* bottom, REAL* out, std::uint8_t* places, long columns) {
  Bytes found;
  long i = 0;
  for (; i + WIDE <= columns; i += WIDE) {
    store(out + i, pool(top + 2 * i, bottom + 2 * i, found));
    std::memcpy(places + i, &found, WIDE);
  }
  if (i == columns) return;
  // What is left, as if there were enough of it.
  REAL rows[2][2 * WIDE] = {}, best[WIDE];
  std::copy_n(top + 2 * i, 2 * (columns - i), rows[0]);
  std::copy_n(bottom + 2 * i, 2 * (columns - i), rows[1]);
  store(best, pool(rows[0], rows[1], found));
  std::copy_n(best, columns - i, out + i);
  std::memcpy(places + i, &found, columns - i);
}

inline void unpool(Vector gradients, Bytes places, REAL* top, REAL* bottom) {
  const Order low = in_turn(0), high = in_turn(WIDE / 2);
  const Order place = __builtin_convertvector(places, Order);
  const Vector none = {};
  for (Integer k = 0; k < 2; k++) {
    const Vector left = place == 2 * k ? gradients : none;
    const Vector right = place == 2 * k + 1 ? gradients : none;
    REAL* to = k ? bottom : top;
    store(to, __builtin_shuffle(left, right, low));
    store(to + WIDE, __builtin_shuffle(left, right, high));
  }
}

void unpool_row(const REAL* gradients, const std::uint8_t* places, REAL* top, REAL* bottom,
                long columns) {
  Bytes found = {};
  long i = 0;
  for (; i + WIDE <= columns; i += WIDE) {
    std::memcpy(&found, places + i, WIDE);
    unpool(load(gradients + i), found, top + 2 * i, bottom + 2 * i);
  }
  if (i == columns) return;
  REAL rows[2][2 * WIDE], given[WIDE] = {};
  std::copy_n(gradients + i, columns - i, given);
  std::memcpy(&found, places + i, columns - i);
  unpool(load(given), found, rows[0], rows[1]);
  std::copy_n(rows[0], 2 * (columns - i), top + 2 * i);
  std::copy_n(rows[1], 2 * (columns - i), bottom + 2 * i);
}

}  // namespace

extern "C" void fmol_pool(const REAL* x, REAL* out, std::uint8_t* places, long planes, long height,
                          long width, int threads) {
  const long rows = height / 2, columns = width / 2;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (long p = 0; p < planes; p++)
    for (long y = 0; y < rows; y++) {
      const REAL* top = x + (p * height + 2 * y) * width;
      const long at = (p * rows + y) * columns;
      pool_row(top, top + width, out + at, places + at, columns);
    }
}

extern "C" void fmol_unpool(const REAL* gradients, const std::uint8_t* places, REAL* out, long planes,
                            long height, long width, int threads) {
  const long rows = height / 2, columns = width / 2;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (long p = 0; p < planes; p++) {
    REAL* plane = out + p * height * width;
    for (long y = 0; y < rows; y++) {
      REAL* top = plane + 2 * y * width;
      const long at = (p * rows + y) * columns;
      unpool_row(gradients + at, places + at, top, top + width, columns);
      for (long k = 0; k < 2; k++)  // What no window covers.
        std::fill(top + k * width + 2 * columns, top + (k + 1) * width, REAL(0));
    }
    std::fill(plane + 2 * rows * width, plane + height * width, REAL(0));
  }
}
