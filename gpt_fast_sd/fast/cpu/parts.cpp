// How kernels go through rows: what all sources of this folder begin with, see cpu_build.text.
#include <cstdint>
#include <type_traits>

namespace {
// of(n, m) for n rows from m on, until all M are done, in parts as even as they can be, of N at most.
template <int N, class Of> static inline void of_rows(int64_t n, int64_t m, const Of& of) {
    if (n == N) of(std::integral_constant<int, N>{}, m);
    else if constexpr (N > 1) of_rows<N - 1>(n, m, of);
}
template <int N, class Of> static inline void in_parts(int64_t m, int64_t M, const Of& of) {
    for (int64_t left = (M - m + N - 1) / N; left; left--) {
        const int64_t n = (M - m + left - 1) / left;
        of_rows<N>(n, m, of);
        m += n;
    }
}
}
