// Errors that reach Python as RuntimeError.
#pragma once

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

namespace cgx {

[[noreturn]] inline void fail(const std::string& what) { throw std::runtime_error(what); }

// Adds the system's words for `error`, a value of errno.
[[noreturn]] inline void fail_errno(const std::string& what, int error = errno) {
    fail(what + ": " + std::strerror(error));
}

}  // namespace cgx
