#include "inbox.h"

#include <algorithm>
#include <new>
#include <string>

#include "errors.h"

namespace cgx {
namespace {

// The first of `items` on the channel. Few are open at a time, and with one channel it is always the first.
template <typename Items>
auto first_of(Items& items, uint32_t channel) {
    return std::find_if(items.begin(), items.end(),
                        [&](const auto& item) { return item.channel == channel; });
}

}  // namespace

std::optional<EarlyPart> Inbox::take_early(const Receive& receive) {
    const auto found = first_of(early_, receive.channel);
    if (found == early_.end()) return std::nullopt;
    if (found->num_bytes != receive.num_bytes) refuse(receive.num_bytes);
    EarlyPart part = std::move(*found);
    early_.erase(found);
    return part;
}

void Inbox::expect(Receive receive) {
    const bool is_coming = memory_ != nullptr && coming_.channel == receive.channel;
    if (!is_coming) {
        due_.push_back(std::move(receive));
        return;
    }
    if (receive.num_bytes != coming_.num_bytes) refuse(receive.num_bytes);
    std::copy_n(coming_.data, num_moved_ - sizeof(Frame), receive.data);
    coming_ = std::move(receive);
    memory_.reset();
}

std::pair<uint8_t*, size_t> Inbox::room() {
    if (num_moved_ < sizeof(Frame))
        return {reinterpret_cast<uint8_t*>(&frame_) + num_moved_, sizeof(Frame) - num_moved_};
    const size_t in_data = num_moved_ - sizeof(Frame);
    return {coming_.data + in_data, coming_.num_bytes - in_data};
}

Inbox::Progress Inbox::advance(size_t num_bytes, double at) {
    const bool begins = num_moved_ == 0, is_framed = num_moved_ >= sizeof(Frame);
    num_moved_ += num_bytes;
    if (num_moved_ < sizeof(Frame)) return {begins, false, nullptr};
    if (!is_framed) begin_part();
    if (num_moved_ < sizeof(Frame) + coming_.num_bytes) return {begins, false, nullptr};
    if (memory_) early_.push_back({coming_.channel, coming_.num_bytes, std::move(memory_), at});
    num_moved_ = 0;
    return {begins, true, std::exchange(coming_, {}).ticket};
}

// The frame is here: finds the receive that its part belongs to.
void Inbox::begin_part() {
    const auto due = first_of(due_, frame_.channel);
    const bool is_next = frame_.number == num_begun_[frame_.channel]++;
    if (due != due_.end()) {
        if (!is_next || due->num_bytes != frame_.num_bytes) refuse(due->num_bytes);
        coming_ = std::move(*due);
        due_.erase(due);
        return;
    }
    const std::string said =
        "rank " + std::to_string(peer_) + " sent a message on channel " + std::to_string(frame_.channel);
    if (!is_next) fail(said + " that is not the next one");
    memory_.reset(new (std::nothrow) uint8_t[frame_.num_bytes]);
    if (!memory_)
        fail(said + " early; there is no memory for its " + std::to_string(frame_.num_bytes) + " bytes");
    coming_ = {frame_.channel, memory_.get(), frame_.num_bytes, nullptr};
}

std::vector<std::shared_ptr<Ticket>> Inbox::give_up() {
    std::vector<std::shared_ptr<Ticket>> tickets;
    for (Receive& receive : due_) tickets.push_back(std::move(receive.ticket));
    if (coming_.ticket) tickets.push_back(std::move(coming_.ticket));
    due_.clear();
    coming_ = {};
    memory_.reset();
    num_moved_ = 0;
    return tickets;
}

void Inbox::refuse(size_t num_bytes_due) const {
    fail("rank " + std::to_string(peer_) + " sent another message than the one of " +
         std::to_string(num_bytes_due) + " bytes that was due");
}

}  // namespace cgx
