#include "link.h"

#include <linux/virtio_net.h>
#include <netinet/tcp.h>
#include <stddef.h>

// A random number in [0, 1), by SplitMix64.
static double uniform(uint64_t* state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return (double)((z ^ z >> 31) >> 11) * 0x1p-53;
}

void init_link(struct link* link, uint64_t random) {
    *link = (struct link){.ns_per_byte = 8, .mtu = UINT32_MAX, .random = random};
    link->tail = &link->head;
}

void count_segments(struct packet* packet) {
    const struct virtio_net_hdr* header = (const void*)packet->data;
    const char* ip = packet->data + sizeof *header;
    packet->bytes = packet->head = packet->size - sizeof *header;
    if (header->gso_type == VIRTIO_NET_HDR_GSO_NONE || header->gso_size == 0) return;
    const struct tcphdr* tcp = (const void*)(ip + header->csum_start);
    if (header->csum_start + sizeof *tcp > packet->bytes) return;
    uint32_t headers = header->csum_start + 4 * tcp->doff;
    if (headers >= packet->bytes) return;
    uint32_t segments = (packet->bytes - headers + header->gso_size - 1) / header->gso_size;
    packet->bytes += (segments - 1) * headers;
    packet->head = segments > 1 ? headers + header->gso_size : packet->bytes;
}

bool enter(struct link* link, struct packet* packet, ns_t from, ns_t earliest) {
    // Before the random number, so that loss stays the same.
    if (packet->head > link->mtu) {
        link->dropped_mtu++;
        return false;
    }
    if (link->loss > 0 && uniform(&link->random) < link->loss) {
        link->dropped_loss++;
        return false;
    }
    double waiting_bytes = (double)max_ns(link->free_at - from, 0) / link->ns_per_byte;
    if (link->queue_bytes > 0 && waiting_bytes + packet->bytes > (double)link->queue_bytes) {
        link->dropped_queue++;
        return false;
    }
    ns_t start = max_ns(link->free_at, from);
    packet->leaves = max_ns(start + (ns_t)(packet->bytes * link->ns_per_byte), earliest);
    link->free_at = packet->leaves;
    ns_t delay = link->delay;
    if (link->jitter > 0) delay += (ns_t)((2 * uniform(&link->random) - 1) * (double)link->jitter);
    link->last_due = packet->due = max_ns(packet->leaves + max_ns(delay, 0), link->last_due);
    packet->next = NULL;
    *link->tail = packet;
    link->tail = &packet->next;
    link->packets++;
    link->bytes += packet->bytes;
    return true;
}

struct packet* leave(struct link* link, ns_t now) {
    struct packet* packet = link->head;
    if (!packet || packet->due > now) return NULL;
    link->head = packet->next;
    if (!link->head) link->tail = &link->head;
    return packet;
}

void change_rate(struct link* link, double ns_per_byte, ns_t now) {
    double factor = ns_per_byte / link->ns_per_byte;
    ns_t shift = 0;
    for (struct packet* packet = link->head; packet; packet = packet->next) {
        if (packet->leaves > now) shift = (ns_t)((double)(packet->leaves - now) * (factor - 1));
        packet->leaves += shift;
        link->last_due = packet->due += shift;
    }
    if (link->free_at > now) link->free_at = now + (ns_t)((double)(link->free_at - now) * factor);
    link->ns_per_byte = ns_per_byte;
}
