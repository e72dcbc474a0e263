// Two clocks, in seconds.
#pragma once

#include <chrono>

namespace cgx {

// For deadlines: never set back.
inline double now_s() {
    using namespace std::chrono;
    return duration<double>(steady_clock::now().time_since_epoch()).count();
}

// The clock of the time stamps that the kernel puts on received bytes.
inline double wall_clock_s() {
    using namespace std::chrono;
    return duration<double>(system_clock::now().time_since_epoch()).count();
}

}  // namespace cgx
