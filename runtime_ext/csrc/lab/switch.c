// A switch between TUN devices, one per host: rate, delay, jitter, loss and queue for each host and
// direction.
//
//   cgx-switch NUM_HOSTS SOCKET SEED
//
// Makes the devices cgx0, cgx1, ... in its network namespace (the lab then moves each into its host), serves
// SOCKET and writes "ready". Host i has the address 10.77.0.(i + 1); packets to other addresses are dropped.
// A packet passes two links, its sender's uplink and its receiver's downlink. Each is a wire that is busy for
// bytes / rate per packet (virtual finish time), then a delay. Packets stay in order, whatever the jitter.
//
// SOCKET is SOCK_SEQPACKET, with one command per message and an answer to each:
//   set HOST up|down NS_PER_BYTE DELAY_NS JITTER_NS LOSS QUEUE_BYTES MTU    -> ok
//                     jitter is uniform in +-JITTER_NS, LOSS is a probability, QUEUE_BYTES 0 is unbounded;
//                     packets of more than MTU bytes are lost, and their sender is not told
//   connect HOST 0|1  0: packets to and from the host, and those on their way, are lost    -> ok
//   counters          -> JSON: how late packets were delivered, and packets of each link
//   clear             starts the counters again    -> ok

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <malloc.h>
#include <net/if.h>
#include <netinet/ip.h>
#include <poll.h>
#include <sched.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "link.h"

enum { MAX_HOSTS = 64, MAX_CLIENTS = 16, MAX_PACKET = 65536 + 64, UP = 0, DOWN = 1 };
enum { LISTENER = MAX_HOSTS, FIRST_CLIENT, NUM_FDS = FIRST_CLIENT + MAX_CLIENTS };
// Read at most this many packets of a host before other hosts and due packets get their turn: a packet takes
// some 20 us.
enum { READ_BATCH = 2 };
// Lateness is counted in steps of 1 us. The last step holds the rest.
enum { LATE_STEP_NS = 1000, NUM_LATE = 100000 };
// On a virtual machine a sleep ends some 50 us late, so wait awake for packets that are due sooner than this.
enum { SPIN_NS = 20000 };
static const uint32_t NETWORK = 10u << 24 | 77u << 16;

static int num_hosts;
static struct pollfd fds[NUM_FDS];
static struct link links[MAX_HOSTS][2];
static bool connected[MAX_HOSTS];
static bool offloads = true;
static uint64_t late[NUM_LATE], num_delivered;
static ns_t latest;

static void die(const char* what) {
    fprintf(stderr, "cgx-switch: %s: %s\n", what, strerror(errno));
    exit(1);
}

static ns_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static void read_host(int host) {
    for (int i = 0; i < READ_BATCH; i++) {
        struct packet* packet = malloc(sizeof *packet + MAX_PACKET);
        if (!packet) die("malloc");
        ssize_t size = read(fds[host].fd, packet->data, MAX_PACKET);
        if (size < 0 && errno != EAGAIN) die("read of a TUN device");
        struct link* up = &links[host][UP];
        if (size >= (ssize_t)(sizeof(struct virtio_net_hdr) + sizeof(struct iphdr)) && connected[host]) {
            packet = realloc(packet, sizeof *packet + size);  // shrinks in place
            if (!packet) die("realloc");
            packet->size = size;
            count_segments(packet);
            packet->span = (ns_t)((packet->bytes - packet->head) * up->ns_per_byte);
            // Read the clock after the packet: read before, a stall of the switch would make the packet
            // early.
            ns_t now = now_ns();
            if (enter(up, packet, now, now)) continue;
        } else if (size >= 0) {
            up->dropped_cut += !connected[host];
        }
        free(packet);
        if (size < 0) return;
    }
}

static int receiver_of(const struct packet* packet) {
    const struct iphdr* ip = (const void*)(packet->data + sizeof(struct virtio_net_hdr));
    uint32_t index = ntohl(ip->daddr) - NETWORK - 1;
    return ip->version == 4 && index < (uint32_t)num_hosts ? (int)index : -1;
}

// Moves a packet from its uplink to a downlink, which takes the first segment as soon as that has arrived.
static void forward(struct packet* packet) {
    int host = receiver_of(packet);
    if (host >= 0 && !connected[host]) links[host][DOWN].dropped_cut++;
    if (host < 0 || !connected[host]) {
        free(packet);
        return;
    }
    struct link* down = &links[host][DOWN];
    ns_t last_segment = (ns_t)(packet->head * down->ns_per_byte);
    if (!enter(down, packet, packet->due - packet->span, packet->due + last_segment)) free(packet);
}

static void deliver(int host, struct packet* packet, ns_t now) {
    ns_t lateness = now - packet->due;
    if (!connected[host]) {
        links[host][DOWN].dropped_cut++;
    } else if (write(fds[host].fd, packet->data, packet->size) < 0 && errno != ENOBUFS && errno != EIO &&
               errno != EAGAIN && errno != ENOMEM && errno != EINVAL) {
        die("write to a TUN device");  // EIO: the device is down
    }
    late[lateness / LATE_STEP_NS < NUM_LATE ? lateness / LATE_STEP_NS : NUM_LATE - 1]++;
    num_delivered++;
    latest = max_ns(latest, lateness);
    free(packet);
}

// The host whose uplink has the first packet to come out, if that is at `now` or before; otherwise -1.
static int first_up(ns_t now) {
    int first = -1;
    for (int host = 0; host < num_hosts; host++) {
        struct packet* packet = links[host][UP].head;
        if (packet && packet->due <= now && (first < 0 || packet->due < links[first][UP].head->due))
            first = host;
    }
    return first;
}

// The shortest delay of all downlinks. A packet that comes out of an uplink is not delivered before this
// delay has passed, so forwarding it by then is soon enough, as long as packets are forwarded in order of
// time. This saves wake-ups.
static ns_t shortest_down(void) {
    ns_t shortest = INT64_MAX;
    for (int host = 0; host < num_hosts; host++) {
        ns_t delay = max_ns(links[host][DOWN].delay - links[host][DOWN].jitter, 0);
        if (delay < shortest) shortest = delay;
    }
    return shortest;
}

// Moves packets that are due. Returns when the next one is.
static ns_t advance(void) {
    ns_t now = now_ns(), next = INT64_MAX, spare = shortest_down();
    for (int host; (host = first_up(now)) >= 0;) forward(leave(&links[host][UP], now));
    for (int host = 0; host < num_hosts; host++) {
        struct packet* packet;
        while ((packet = leave(&links[host][DOWN], now))) {
            deliver(host, packet, now);
            now = now_ns();
        }
        struct packet *up = links[host][UP].head, *down = links[host][DOWN].head;
        if (up && up->due + spare < next) next = up->due + spare;
        if (down && down->due < next) next = down->due;
    }
    return next;
}

// Loss and full queues drop single packets, so senders segment as long as a link has either.
static void set_offloads(void) {
    bool wanted = true;
    for (int host = 0; host < num_hosts; host++)
        for (int way = UP; way <= DOWN; way++)
            wanted &= links[host][way].loss == 0 && links[host][way].queue_bytes == 0;
    if (wanted == offloads) return;
    offloads = wanted;
    for (int host = 0; host < num_hosts; host++)
        if (ioctl(fds[host].fd, TUNSETOFFLOAD, offloads ? TUN_F_CSUM | TUN_F_TSO4 : 0)) die("TUNSETOFFLOAD");
}

struct text {
    char data[MAX_HOSTS * 512];
    size_t size;
};

__attribute__((format(printf, 2, 3))) static void add(struct text* text, const char* format, ...) {
    va_list list;
    va_start(list, format);
    text->size += vsnprintf(text->data + text->size, sizeof text->data - text->size, format, list);
    va_end(list);
}

// Milliseconds of lateness that a share of the packets does not exceed.
static double lateness_ms(double share) {
    uint64_t seen = 0;
    for (int i = 0; i < NUM_LATE; i++) {
        seen += late[i];
        if ((double)seen >= share * (double)num_delivered) return (i + 1) * (LATE_STEP_NS * 1e-6);
    }
    return latest * 1e-6;
}

static void add_counters(struct text* text) {
    double p50 = num_delivered ? lateness_ms(0.5) : 0, p99 = num_delivered ? lateness_ms(0.99) : 0;
    add(text,
        "{\"delivered\": %" PRIu64
        ", \"late_ms\": {\"p50\": %.3f, \"p99\": %.3f, \"max\": %.3f}, \"hosts\": [",
        num_delivered, p50, p99, (double)latest * 1e-6);
    for (int host = 0; host < num_hosts; host++) {
        for (int way = UP; way <= DOWN; way++) {
            struct link* link = &links[host][way];
            add(text, "%s\"%s\": {\"packets\": %" PRIu64 ", \"bytes\": %" PRIu64,
                way    ? ", "
                : host ? ", {"
                       : "{",
                way ? "down" : "up", link->packets, link->bytes);
            add(text,
                ", \"dropped_queue\": %" PRIu64 ", \"dropped_loss\": %" PRIu64 ", \"dropped_mtu\": %" PRIu64
                ", \"dropped_cut\": %" PRIu64 "}",
                link->dropped_queue, link->dropped_loss, link->dropped_mtu, link->dropped_cut);
        }
        add(text, "}");
    }
    add(text, "]}");
}

static void clear_counters(void) {
    memset(late, 0, sizeof late);
    num_delivered = 0;
    latest = 0;
    for (int host = 0; host < num_hosts; host++)
        for (int way = UP; way <= DOWN; way++) {
            struct link* link = &links[host][way];
            link->packets = link->bytes = 0;
            link->dropped_queue = link->dropped_loss = link->dropped_mtu = link->dropped_cut = 0;
        }
}

static bool obey(const char* command, struct text* answer) {
    int host, value, end = 0;
    char way[5];
    struct link new;
    if (sscanf(command, "set %d %4s %lf %" SCNd64 " %" SCNd64 " %lf %" SCNd64 " %" SCNu32 "%n", &host, way,
               &new.ns_per_byte, &new.delay, &new.jitter, &new.loss, &new.queue_bytes, &new.mtu, &end) == 8) {
        bool is_up = !strcmp(way, "up");
        if (command[end] || host < 0 || host >= num_hosts || !(is_up || !strcmp(way, "down"))) return false;
        if (!(new.ns_per_byte > 0)) return false;
        struct link* link = &links[host][is_up ? UP : DOWN];
        change_rate(link, new.ns_per_byte, now_ns());
        link->delay = new.delay, link->jitter = new.jitter;
        link->loss = new.loss, link->queue_bytes = new.queue_bytes, link->mtu = new.mtu;
        set_offloads();
    } else if (sscanf(command, "connect %d %d%n", &host, &value, &end) == 2) {
        if (command[end] || host < 0 || host >= num_hosts) return false;
        connected[host] = value;
    } else if (!strcmp(command, "counters")) {
        add_counters(answer);
        return true;
    } else if (!strcmp(command, "clear")) {
        clear_counters();
    } else {
        return false;
    }
    add(answer, "ok");
    return true;
}

static void serve(struct pollfd* client) {
    static struct text answer;
    char command[256];
    ssize_t size = recv(client->fd, command, sizeof command - 1, 0);
    if (size <= 0) {
        close(client->fd);
        client->fd = -1;
        return;
    }
    command[size] = 0;
    answer.size = 0;
    if (!obey(command, &answer)) add(&answer, "not a command: %s", command);
    // A client that does not read its answers loses them: the switch never waits.
    (void)!send(client->fd, answer.data, answer.size, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static void welcome(void) {
    int fd = accept4(fds[LISTENER].fd, NULL, NULL, SOCK_CLOEXEC);
    if (fd < 0) return;
    for (int i = FIRST_CLIENT; i < NUM_FDS; i++)
        if (fds[i].fd < 0) {
            fds[i] = (struct pollfd){.fd = fd, .events = POLLIN};
            return;
        }
    close(fd);
}

static int open_tun(int host) {
    struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR};
    snprintf(request.ifr_name, sizeof request.ifr_name, "cgx%d", host);
    int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) die("/dev/net/tun");
    if (ioctl(fd, TUNSETIFF, &request)) die(request.ifr_name);
    if (ioctl(fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)) die("TUNSETOFFLOAD");
    return fd;
}

static int listen_at(const char* path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0 || bind(fd, (struct sockaddr*)&address, sizeof address) || listen(fd, MAX_CLIENTS)) die(path);
    return fd;
}

int main(int argc, char** argv) {
    if (argc != 4) {
        fprintf(stderr, "usage: cgx-switch NUM_HOSTS SOCKET SEED\n");
        return 2;
    }
    mallopt(M_TRIM_THRESHOLD, 256 << 20);  // returned memory would cost page faults later
    num_hosts = atoi(argv[1]);
    uint64_t seed = strtoull(argv[3], NULL, 10);
    if (num_hosts < 1 || num_hosts > MAX_HOSTS) return 2;
    for (int i = 0; i < NUM_FDS; i++) fds[i].fd = -1;
    for (int host = 0; host < num_hosts; host++) {
        fds[host] = (struct pollfd){.fd = open_tun(host), .events = POLLIN};
        connected[host] = true;
        for (int way = UP; way <= DOWN; way++) {
            uint64_t number = seed << 8 | (uint64_t)(2 * host + way);
            init_link(&links[host][way], number * 0xd1342543de82ef95);
        }
    }
    fds[LISTENER] = (struct pollfd){.fd = listen_at(argv[2]), .events = POLLIN};
    // Run before the programs in the hosts: the switch stands for hardware, and a late switch would falsify
    // the network. It sleeps whenever nothing is due. Without permission for real-time scheduling it works
    // too, only later.
    struct sched_param priority = {.sched_priority = 1};
    if (sched_setscheduler(0, SCHED_FIFO, &priority)) prctl(PR_SET_TIMERSLACK, 1);
    printf("ready\n");
    fflush(stdout);
    for (;;) {
        ns_t next = advance();
        ns_t wait = max_ns(next == INT64_MAX ? 1000000000 : next - now_ns(), 0);
        if (wait < SPIN_NS) wait = 0;
        struct timespec timeout = {.tv_sec = wait / 1000000000, .tv_nsec = wait % 1000000000};
        int ready = ppoll(fds, NUM_FDS, &timeout, NULL);
        if (ready < 0 && errno != EINTR) die("ppoll");
        if (ready <= 0) continue;
        for (int host = 0; host < num_hosts; host++)
            if (fds[host].revents) read_host(host);
        if (fds[LISTENER].revents) welcome();
        for (int i = FIRST_CLIENT; i < NUM_FDS; i++)
            if (fds[i].fd >= 0 && fds[i].revents) serve(&fds[i]);
    }
}
