// Drives the mesh, the rings, LocalGroup, signs of life and the kernels' threads from many threads, in a
// build with ThreadSanitizer (`make test-sanitize`). All ranks are threads of this process and share one
// mapping of the segment: in several processes the sanitizer would see one end of each hand-over only.
//
//     races ROUNDS
//
// Ends with status 0 if every message and every sum was right. Whatever is random comes from fixed seeds.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "heartbeat.h"
#include "mesh.h"
#include "shm_group.h"
#include "threads.h"

namespace {

constexpr int kRanks = 3;
constexpr int kChannels = 2;
constexpr double kTimeoutS = 120;
// Empty, shorter than a frame, one part, several parts on two connections, and longer than a ring.
constexpr int64_t kSizes[] = {0, 1, 15, 1000, 40'000, 300'000};

using Bytes = std::vector<uint8_t>;

void check(bool is_right, const std::string& what) {
    if (is_right) return;
    std::fprintf(stderr, "wrong: %s\n", what.c_str());
    std::exit(1);
}

// Calls f(0), f(1), ... at the same time. An error that leaves one of them ends the program with its text.
void in_threads(int count, const std::function<void(int)>& f) {
    std::vector<std::thread> threads;
    for (int i = 0; i < count; ++i) threads.emplace_back(f, i);
    for (std::thread& thread : threads) thread.join();
}

// Returns the error that f throws, or an empty text.
std::string error_of(const std::function<void()>& f) {
    try {
        f();
    } catch (const std::runtime_error& error) {
        return error.what();
    }
    return "";
}

// What rank `from` sends to `to` as its number-th message on a channel.
Bytes message(int from, int to, uint32_t channel, int number) {
    std::seed_seq seed{from, to, static_cast<int>(channel), number};
    std::minstd_rand random(seed);
    Bytes bytes(kSizes[random() % std::size(kSizes)]);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random() >> 8);
    return bytes;
}

class Run {
  public:
    // With `shares_memory` messages go through rings, else over two connections between each pair of ranks.
    explicit Run(bool shares_memory) {
        std::vector<std::pair<std::string, int>> addresses;
        for (int rank = 0; rank < kRanks; ++rank) {
            meshes_.push_back(std::make_unique<cgx::Mesh>(
                rank, kRanks, 2, "127.0.0.1", std::string(cgx::kTokenBytes, 't'), 0.0, std::pair{0, 0}));
            addresses.emplace_back("127.0.0.1", meshes_.back()->port());
        }
        const auto segment = shares_memory ? std::make_shared<cgx::Segment>(kRanks) : nullptr;
        const std::vector<int> sharers = shares_memory ? std::vector{0, 1, 2} : std::vector<int>{};
        in_threads(kRanks, [&](int rank) { meshes_[rank]->connect(addresses, kTimeoutS, segment, sharers); });
    }

    // Each rank exchanges messages with all others on each channel, a thread per channel, while another
    // thread wakes and asks.
    void exchange(int num_messages) {
        in_threads(kRanks, [&](int rank) {
            std::atomic<bool> is_done = false;
            std::thread meddler([&] {
                while (!is_done) {
                    meshes_[rank]->wake();
                    meshes_[rank]->take_bursts();
                    std::this_thread::sleep_for(std::chrono::milliseconds(1));
                }
            });
            in_threads(kChannels, [&](int channel) {
                for (int number = 0; number < num_messages; ++number) exchange_one(rank, channel, number);
            });
            is_done = true;
            meddler.join();
        });
    }

    // Takes minima over all ranks, in two rounds each.
    void agree(int num_minima) {
        in_threads(kRanks, [&](int rank) {
            for (int number = 0; number < num_minima; ++number) {
                int64_t values[] = {number + rank, -rank};
                take_minimum(rank, values);
                check(values[0] == number && values[1] == 1 - kRanks, "a minimum");
            }
        });
    }

    // Hangs up while all ranks take one minimum after the other: whatever round is under way or about to
    // begin ends with an error.
    void hang_up_on_minima() {
        hang_up_during([&](int rank) {
            int64_t values[] = {rank, -rank};
            while (true) take_minimum(rank, values);
        });
    }

    // Hangs up while all ranks wait for a message that never comes.
    void hang_up() {
        hang_up_during([&](int rank) {
            uint8_t byte;
            const int64_t ticket = meshes_[rank]->post({}, {{(rank + 1) % kRanks, &byte, 1}}, 9, false);
            meshes_[rank]->wait(ticket, kTimeoutS, 0);
        });
    }

  private:
    // Rank 0 hangs up while each rank does `work`, which must end with an error and not by a time-out.
    void hang_up_during(const std::function<void(int)>& work) {
        in_threads(kRanks + 1, [&](int rank) {
            if (rank == kRanks) {
                std::this_thread::sleep_for(std::chrono::milliseconds(5));
                meshes_[0]->close();
                return;
            }
            const std::string error = error_of([&] { work(rank); });
            check(!error.empty() && error.find("did not answer") == std::string::npos,
                  "rank " + std::to_string(rank) + " ended with '" + error + "'");
        });
    }

    void take_minimum(int rank, int64_t (&values)[2]) {
        // 0 meets 1, then 2, and 1 meets 2: each knows the minimum after its second round.
        static const std::vector<std::vector<int>> kRounds[] = {{{1}, {2}}, {{0}, {2}}, {{0}, {1}}};
        const int64_t ticket = meshes_[rank]->post_minimum(reinterpret_cast<uint8_t*>(values), sizeof values,
                                                           true, kRounds[rank], 7);
        meshes_[rank]->wait(ticket, kTimeoutS, 0);
    }

    void exchange_one(int rank, int channel, int number) {
        // A third with checksums.
        const bool is_sealed = number % 3 == 0;
        const auto unsealed = [&](int from, int to) {
            Bytes bytes = message(from, to, channel, number);
            if (is_sealed) bytes.resize(std::max(bytes.size(), cgx::kHeaderBytes));
            return bytes;
        };
        std::vector<Bytes> sent(kRanks), received(kRanks);
        std::vector<cgx::Message> sends, receives;
        for (int peer = 0; peer < kRanks; ++peer) {
            if (peer == rank) continue;
            sent[peer] = unsealed(rank, peer);
            received[peer].resize(unsealed(peer, rank).size());
            sends.push_back({peer, sent[peer].data(), std::ssize(sent[peer])});
            receives.push_back({peer, received[peer].data(), std::ssize(received[peer])});
        }
        cgx::Mesh& mesh = *meshes_[rank];
        const int64_t ticket = mesh.post(sends, receives, channel, is_sealed);
        if (number % 2 == 1) {
            while (!mesh.wait_any({ticket}, 0.01)) check(!mesh.has_failed(ticket), "a message failed");
            check(mesh.is_over(ticket), "a ticket that wait_any returned is not over");
        }
        mesh.wait(ticket, kTimeoutS, 0);
        for (int peer = 0; peer < kRanks; ++peer) {
            if (peer == rank) continue;
            Bytes expected = unsealed(peer, rank);
            if (is_sealed) cgx::seal(expected.data(), expected.size());
            check(received[peer] == expected,
                  "message " + std::to_string(number) + " of rank " + std::to_string(peer));
        }
    }

    std::vector<std::unique_ptr<cgx::Mesh>> meshes_;
};

// Sums and gathers of ranks that come at different times; then one rank calls another operation.
void drive_group(int num_operations) {
    const auto segment = std::make_shared<cgx::Segment>(kRanks);
    constexpr auto kType = cgx::LocalGroup::Type::kFloat32;
    constexpr int64_t kNumels[] = {0, 1, 1000, 40'000, 200'000};  // up to several slots
    in_threads(kRanks, [&](int rank) {
        cgx::LocalGroup group(segment, rank, {0, 1, 2}, kTimeoutS);
        for (int i = 0; i < num_operations; ++i) {
            const int64_t numel = kNumels[i % std::size(kNumels)], third = numel / kRanks;
            const cgx::LocalGroup::Bounds bounds = {{0, third}, {third, 2 * third}, {2 * third, 3 * third}};
            std::vector<float> values(numel, static_cast<float>(rank + 1));
            group.reduce_scatter(values.data(), kType, bounds);
            group.all_gather(values.data(), kType, bounds);
            for (int64_t k = 0; k < 3 * third; ++k) check(values[k] == 6, "a sum by reduce_scatter");
            std::fill(values.begin(), values.end(), static_cast<float>(rank + 1));
            group.all_reduce(values.data(), numel, kType);
            for (const float value : values) check(value == 6, "a sum by all_reduce");
        }
        std::vector<float> values(10 + rank);
        const std::string error = error_of([&] { group.all_reduce(values.data(), 10 + rank, kType); });
        check(error.find("called another operation") != std::string::npos ||
                  error.find("hung up") != std::string::npos,
              "other sizes were summed: " + error);
    });
}

// Beats go out while others send on the same socket, until they are stopped.
void drive_heartbeat(int num_beats) {
    int ends[2];
    check(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0, "no pair of sockets");
    const cgx::FileDescriptor own(ends[0]), peer(ends[1]);
    int num_own = 0, num_others = 0;
    {
        cgx::Heartbeat heartbeat({own.get()}, "beat", 0.001);
        while (num_own < num_beats) {
            check(send(own.get(), "word", 4, MSG_NOSIGNAL) == 4, "a word was not sent");
            char frame[4];
            check(recv(peer.get(), frame, 4, MSG_WAITALL) == 4, "the sender hung up");
            const bool is_beat = std::memcmp(frame, "beat", 4) == 0;
            check(is_beat || std::memcmp(frame, "word", 4) == 0, "a beat lies within a word");
            ++(is_beat ? num_own : num_others);
        }
        heartbeat.stop();
    }
    check(num_others > 0, "no word came");
}

// Several threads hand parts to the kernels' workers at the same time.
void drive_workers(int num_calls) {
    constexpr int64_t kNumel = 4 * cgx::kMinOnePassPart + 5;
    in_threads(3, [&](int caller) {
        std::vector<int> values(kNumel);
        for (int i = 0; i < num_calls; ++i) {
            cgx::parallel_for(1 + (caller + i) % 4, kNumel, 8, [&](int64_t begin, int64_t end) {
                for (int64_t k = begin; k < end; ++k) ++values[k];
            });
        }
        for (const int value : values) check(value == num_calls, "a part was left out or done twice");
    });
}

}  // namespace

int main(int, char** arguments) {
    const int num_rounds = std::atoi(arguments[1]);
    for (int round = 0; round < num_rounds; ++round) {
        for (const bool shares_memory : {false, true}) {
            Run run(shares_memory);
            run.exchange(12);
            run.agree(50);
            run.hang_up();
            Run(shares_memory).hang_up_on_minima();
        }
        drive_group(10);
        drive_workers(20);
        drive_heartbeat(20);
    }
    std::printf("no data race in %d rounds\n", num_rounds);
}
