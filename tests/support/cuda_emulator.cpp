// Runs a CUDA kernel on the CPU: every thread of a block is a fibre, blocks run one after another.
//
// A fibre runs until it reaches a barrier. The next one is drawn at random, so a missing barrier shows as a
// wrong result. Three mistakes end the run with a message: a barrier that not all threads reach, a shuffle
// that reads a lane which does not take part, and a read or write outside of a buffer (the caller protects
// the pages around it).
#include "cuda_emulator.h"

#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdarg>
#include <cstdio>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

Dim threadIdx, blockIdx, blockDim, gridDim;

namespace {

using emulator::Arrival;
using emulator::Kind;

constexpr size_t kStackBytes = 256 << 10;
constexpr unsigned kMaxThreads = 1024;

enum class State { kReady, kWaiting, kDone };

struct Fibre {
    ucontext_t context;
    unsigned index;
    State state;
    Arrival arrival;
    uint64_t result;
};

using Call = void (*)(void**);

ucontext_t scheduler;
std::vector<Fibre> fibres;
Fibre* current;
Call call;
void** call_args;
std::mt19937 generator;
sigjmp_buf out;
char message[512];

[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char* format, ...) {
    int used = snprintf(message, sizeof message, "block %u, thread %u: ", blockIdx.x, threadIdx.x);
    va_list args;
    va_start(args, format);
    vsnprintf(message + used, sizeof message - used, format, args);
    va_end(args);
    siglongjmp(out, 1);
}

void on_signal(int number, siginfo_t* info, void*) {
    if (number == SIGSEGV || number == SIGBUS) fail("touched address %p", info->si_addr);
    fail("undefined behaviour: an index, a shift, an alignment or a conversion to integer is out of range");
}

void run_thread() {
    call(call_args);
    current->state = State::kDone;
    swapcontext(&current->context, &scheduler);
}

const char* name(Kind kind) {
    switch (kind) {
        case Kind::kBlock:
        case Kind::kCount:
            return "__syncthreads";
        case Kind::kWarp:
            return "__syncwarp";
        case Kind::kShuffle:
            return "shuffle";
        case Kind::kBallot:
            return "ballot";
        case Kind::kMatch:
            return "match";
        default:
            return "reduce";
    }
}

bool is_block_wide(Kind kind) { return kind == Kind::kBlock || kind == Kind::kCount; }

// Returns the threads that the current one must meet at this barrier.
std::vector<Fibre*> party_of(const Arrival& arrival) {
    std::vector<Fibre*> party;
    if (is_block_wide(arrival.kind)) {
        for (Fibre& fibre : fibres) party.push_back(&fibre);
        return party;
    }
    const unsigned warp = current->index / 32 * 32;
    if (!(arrival.mask >> current->index % 32 & 1)) fail("line %d: not in its own mask", arrival.line);
    for (unsigned lane = 0; lane < 32; ++lane) {
        if (!(arrival.mask >> lane & 1)) continue;
        if (warp + lane >= fibres.size()) fail("line %d: lane %u does not exist", arrival.line, lane);
        party.push_back(&fibres[warp + lane]);
    }
    return party;
}

uint64_t result_for(const Fibre& fibre, const std::vector<Fibre*>& party) {
    const Kind kind = fibre.arrival.kind;
    if (kind == Kind::kShuffle) {
        if (!(fibre.arrival.mask >> fibre.arrival.source & 1))
            fail("line %d: a shuffle reads lane %u, which is not in the mask", fibre.arrival.line,
                 fibre.arrival.source);
        return fibres[fibre.index / 32 * 32 + fibre.arrival.source].arrival.value;
    }
    uint64_t result = kind == Kind::kMin ? ~0ull : 0;
    for (const Fibre* other : party) {
        const uint64_t value = other->arrival.value;
        const uint64_t bit = 1ull << other->index % 32;
        if (kind == Kind::kBallot) result |= value ? bit : 0;
        if (kind == Kind::kMatch) result |= value == fibre.arrival.value ? bit : 0;
        if (kind == Kind::kAdd || kind == Kind::kCount) result += value;
        if (kind == Kind::kOr) result |= value;
        if (kind == Kind::kMin) result = std::min(result, value);
        if (kind == Kind::kMax) result = std::max(result, value);
    }
    return result;
}

void run_block(unsigned block, unsigned block_size, char* stacks) {
    blockIdx.x = block;
    fibres.resize(block_size);
    for (unsigned index = 0; index < block_size; ++index) {
        Fibre& fibre = fibres[index];
        fibre.index = index;
        fibre.state = State::kReady;
        getcontext(&fibre.context);
        fibre.context.uc_stack = {stacks + index * kStackBytes, 0, kStackBytes};
        makecontext(&fibre.context, run_thread, 0);
    }
    std::vector<Fibre*> ready;
    while (true) {
        // Half of the warps rest in a round, so that some run far ahead of others.
        const unsigned resting = generator();
        ready.clear();
        bool done = true;
        for (Fibre& fibre : fibres) {
            if (fibre.state != State::kReady) continue;
            done = false;
            if (resting >> fibre.index / 32 & 1) ready.push_back(&fibre);
        }
        if (done) break;
        std::shuffle(ready.begin(), ready.end(), generator);
        for (Fibre* fibre : ready) {
            current = fibre;
            threadIdx.x = fibre->index;
            swapcontext(&scheduler, &fibre->context);
        }
    }
    for (const Fibre& fibre : fibres) {
        if (fibre.state != State::kWaiting) continue;
        threadIdx.x = fibre.index;
        fail("waits for ever at the %s of line %d: others returned, or wait elsewhere",
             name(fibre.arrival.kind), fibre.arrival.line);
    }
}

}  // namespace

uint64_t emulator::meet(Arrival arrival) {
    Fibre* self = current;
    self->arrival = arrival;
    self->state = State::kWaiting;
    const std::vector<Fibre*> party = party_of(arrival);
    bool complete = true;
    for (const Fibre* other : party) {
        if (other->state == State::kDone)
            fail("line %d: the %s names thread %u, which has returned", arrival.line, name(arrival.kind),
                 other->index);
        const Arrival& its = other->arrival;
        // A thread that waits for its warp comes here later. If not, the end of the block finds it waiting.
        if (other->state == State::kReady || is_block_wide(its.kind) != is_block_wide(arrival.kind)) {
            complete = false;
            continue;
        }
        if (its.kind != arrival.kind || its.line != arrival.line || its.mask != arrival.mask)
            fail("is at the %s of line %d, thread %u at the %s of line %d", name(arrival.kind), arrival.line,
                 other->index, name(its.kind), its.line);
    }
    if (complete) {
        for (Fibre* other : party) other->result = result_for(*other, party);
        for (Fibre* other : party) other->state = State::kReady;
    }
    // The last thread to arrive also yields, so that the order after the barrier is drawn again.
    swapcontext(&self->context, &scheduler);
    return self->result;
}

// Returns null, or an error message. `args` are pointers to the kernel's arguments.
extern "C" const char* emulate(Call kernel, void** args, unsigned num_blocks, unsigned block_size,
                               unsigned seed) {
    static const std::unique_ptr<char, void (*)(char*)> stacks(
        static_cast<char*>(mmap(nullptr, kMaxThreads * kStackBytes, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)),
        [](char* stack) { munmap(stack, kMaxThreads * kStackBytes); });
    static char signal_stack[64 << 10];
    if (num_blocks == 0 || block_size == 0 || block_size > kMaxThreads)
        return "not a grid that CUDA can launch";

    call = kernel;
    call_args = args;
    generator.seed(seed);
    gridDim.x = num_blocks;
    blockDim.x = block_size;

    const stack_t alternate = {signal_stack, 0, sizeof signal_stack};
    stack_t old_stack;
    sigaltstack(&alternate, &old_stack);
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGILL, SIGTRAP, SIGFPE};
    struct sigaction old_actions[std::size(kSignals)];
    for (size_t i = 0; i < std::size(kSignals); ++i) sigaction(kSignals[i], &action, &old_actions[i]);

    const bool failed = sigsetjmp(out, 1) != 0;
    if (!failed) {
        std::vector<unsigned> blocks(num_blocks);
        std::iota(blocks.begin(), blocks.end(), 0u);
        std::shuffle(blocks.begin(), blocks.end(), generator);
        for (unsigned block : blocks) run_block(block, block_size, stacks.get());
    }
    for (size_t i = 0; i < std::size(kSignals); ++i) sigaction(kSignals[i], &old_actions[i], nullptr);
    sigaltstack(&old_stack, nullptr);
    return failed ? message : nullptr;
}
