// One direction of a host's link: a wire of some rate with a queue before it, then a delay.
#pragma once

#include <stdbool.h>
#include <stdint.h>

typedef int64_t ns_t;

struct packet {
    struct packet* next;
    ns_t leaves;     // when its last byte leaves the wire of the link it is on
    ns_t due;        // when it comes out at the end of that link
    ns_t span;       // from the end of its first segment to the end of its last, at the rate of the uplink
    uint32_t bytes;  // on the wire: all segments with their headers
    uint32_t head;   // bytes of the first segment
    uint32_t size;   // of `data`
    char data[];     // struct virtio_net_hdr, IP packet
};

struct link {
    double ns_per_byte;
    ns_t delay, jitter;
    double loss;          // probability
    int64_t queue_bytes;  // 0: unbounded
    uint32_t mtu;         // bytes of the largest packet that passes
    uint64_t random;      // state of the random numbers
    ns_t free_at;         // when the wire has sent all its packets
    ns_t last_due;        // of the packet that entered last: packets stay in order
    struct packet *head, **tail;
    uint64_t packets, bytes, dropped_queue, dropped_loss, dropped_mtu, dropped_cut;
};

static inline ns_t max_ns(ns_t a, ns_t b) { return a > b ? a : b; }

// Makes an empty link of 1 Gbit/s without a delay, for packets of all sizes.
void init_link(struct link* link, uint64_t random);

// Sets `bytes` and `head` of a packet: what segmentation will make of it on a wire. Senders leave
// segmentation to the receiver, as on a veth, because 64 KiB in one piece cost little more than 9 KB. The
// wire is still busy for all segments, and the first one goes ahead.
void count_segments(struct packet* packet);

// Puts the packet on the link. The wire can take it from `from` on, and it leaves the wire at `earliest` or
// later. False if the link drops it; the caller keeps it then.
bool enter(struct link* link, struct packet* packet, ns_t from, ns_t earliest);

// Takes the first packet off the link if it is due at `now`, otherwise returns NULL.
struct packet* leave(struct link* link, ns_t now);

// Gives the link a new rate. The waiting time of packets before the wire changes in proportion.
void change_rate(struct link* link, double ns_per_byte, ns_t now);
