// Chooses the instruction set of the loops over all elements, when the first one runs.
#pragma once

#include <string>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CGX_HAS_X86_LOOPS 1  // Clang has no pragma that sets the target of a file
#endif

namespace cgx {

// Narrow to wide. AVX2 stands for all of x86-64-v3, AVX-512 for all of x86-64-v4.
enum class InstructionSet { kPortable, kAvx2, kAvx512 };

// The one in use: the widest that this processor runs, unless a test chose another.
InstructionSet instruction_set();

// Names of those that this processor runs, narrow to wide.
std::vector<std::string> instruction_sets();

// For tests: uses the loops for `name` from now on, in all threads. Throws std::invalid_argument unless it is
// one of instruction_sets().
void use_instruction_set(const std::string& name);

}  // namespace cgx
