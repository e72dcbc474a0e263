// Tells which instruction sets have loops of their own.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(CGX_NO_AVX2)
#define CGX_HAS_AVX2 1  // Clang has no pragma that sets the target of a file

namespace cgx {

inline bool has_avx2() { return __builtin_cpu_supports("x86-64-v3"); }

}  // namespace cgx
#endif
