#include "isa.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>

namespace cgx {
namespace {

constexpr const char* kNames[] = {"portable", "avx2", "avx512"};  // in the order of InstructionSet

InstructionSet widest() {
#if CGX_HAS_X86_LOOPS
    if (__builtin_cpu_supports("x86-64-v4")) return InstructionSet::kAvx512;
    if (__builtin_cpu_supports("x86-64-v3")) return InstructionSet::kAvx2;
#endif
    return InstructionSet::kPortable;
}

std::atomic<InstructionSet> in_use = widest();

}  // namespace

InstructionSet instruction_set() { return in_use.load(std::memory_order_relaxed); }

std::vector<std::string> instruction_sets() { return {kNames, kNames + static_cast<int>(widest()) + 1}; }

void use_instruction_set(const std::string& name) {
    const std::vector<std::string> names = instruction_sets();
    const auto found = std::find(names.begin(), names.end(), name);
    if (found == names.end()) {
        std::string allowed;
        for (const std::string& each : names) allowed += (allowed.empty() ? "" : ", ") + each;
        throw std::invalid_argument("instruction set '" + name + "' does not run here; give " + allowed);
    }
    in_use = static_cast<InstructionSet>(found - names.begin());
}

}  // namespace cgx
