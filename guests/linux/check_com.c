// SPDX-License-Identifier: GPL-2.0-only
/*
 * Test of /dev/parador-com*: runs in the two guests at the ends of a channel, whose sides take
 * turns. Everything that a program can do is done, and what it must not is refused. Ends with 0
 * if all is as it should be.
 *
 * No step waits for a time: a side continues when its peer has reached the same step.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "parador_com.h"

#define DEVICE "/dev/parador-com0"
/* Of the bus of the channel. */
#ifdef __x86_64__
#define DRIVER "/sys/bus/pci/drivers/parador_com/"
#else
#define DRIVER "/sys/bus/platform/drivers/parador_com/"
#endif
#define ENTRIES 64	/* of a ring */
#define PAGE 4096UL
#define HUGE_PAGE (2UL << 20)
/* The share that is used, and one that is not. */
#define SHARE 1
#define OTHER 2
#define SHARED (16 * PAGE)
#define UNPRIVILEGED_UID 65534

static int com;
static unsigned int side;
static unsigned int step;

#define CHECK(condition)                                                                                     \
	do {                                                                                                 \
		if (!(condition)) {                                                                          \
			int error = errno;                                                                   \
			printf("FAILED: line %d, step %u: %s (%s)\n", __LINE__, step, #condition,            \
			       strerror(error));                                                             \
			fflush(stdout);                                                                      \
			_exit(1);                                                                            \
		}                                                                                            \
	} while (0)

/* The call fails in this way. */
#define REFUSED(call, reason) CHECK((long)(call) == -1 && errno == (reason))

/*
 * ---- the two sides
 * ---------------------------------------------------------------------------------------
 */

/* Any function of two numbers: what is expected in memory and messages. */
static uint64_t mix(uint64_t seed, uint64_t index)
{
	uint64_t x = (seed << 32 ^ index) * 0x9e3779b97f4a7c15;

	return (x ^ x >> 29) * 0xbf58476d1ce4e5b9;
}

static void tell(void)
{
	struct parador_com_message message = { .length = 4, .tag = ++step, .payload = "step" };

	CHECK(ioctl(com, PARADOR_COM_SEND, &message) == 0);
}

static void expect(void)
{
	struct parador_com_message message;

	step++;
	CHECK(ioctl(com, PARADOR_COM_RECEIVE, &message) == 0);
	CHECK(message.tag == step && message.length == 4 && !memcmp(message.payload, "step", 4));
}

/* Continues when the leading side is here, then when both are. */
static void meet(void)
{
	if (side == 0) {
		tell();
		expect();
	} else {
		expect();
		tell();
	}
}

static short ready(short events)
{
	struct pollfd poller = { .fd = com, .events = events };

	CHECK(poll(&poller, 1, 0) >= 0);
	return poller.revents;
}

static void wait_until(short events)
{
	struct pollfd poller = { .fd = com, .events = events };

	CHECK(poll(&poller, 1, -1) == 1 && poller.revents & events);
}

static void set_waiting(bool waits)
{
	CHECK(fcntl(com, F_SETFL, waits ? 0 : O_NONBLOCK) == 0);
}

/*
 * ---- messages
 * --------------------------------------------------------------------------------------------
 */

static void identities(void)
{
	struct parador_com_info info, again;

	CHECK(ioctl(com, PARADOR_COM_INFO, &info) == 0);
	side = info.side;
	CHECK(side <= 1 && info.own_id != info.peer_id && info.has_doorbell == 1);
	CHECK(memcmp(info.own_name, info.peer_name, PARADOR_COM_NAME) != 0);
	/* Every change is signalled: no side has to poll. */
	for (again = info; !again.peer_runs;) {
		struct parador_com_list list;

		wait_until(POLLPRI);
		CHECK(ioctl(com, PARADOR_COM_LIST, &list) == 0);
		CHECK(ioctl(com, PARADOR_COM_INFO, &again) == 0);
	}
	REFUSED(ioctl(com, _IO('P', 0xff)), ENOTTY);
	REFUSED(ioctl(com, PARADOR_COM_INFO, NULL), EFAULT);
}

/* Nothing has come: the other side waits for this one. */
static void nothing(void)
{
	char byte;

	set_waiting(false);
	REFUSED(read(com, &byte, 1), EAGAIN);
	set_waiting(true);
	CHECK(ready(POLLIN | POLLOUT) == POLLOUT);
}

/* Messages of all lengths: one way, and back. */
static void lengths(void)
{
	unsigned char sent[PARADOR_COM_PAYLOAD + 1], got[PARADOR_COM_PAYLOAD + 1];
	unsigned int length, index;

	for (length = 0; length <= PARADOR_COM_PAYLOAD; length++) {
		for (index = 0; index < length; index++)
			sent[index] = mix(length, index);
		if (side == 0)
			CHECK(write(com, sent, length) == length);
		wait_until(POLLIN);
		if (length)
			REFUSED(read(com, got, length - 1), EMSGSIZE);
		CHECK(read(com, got, sizeof(got)) == length && !memcmp(sent, got, length));
		if (side == 1)
			CHECK(write(com, sent, length) == length);
	}
	REFUSED(write(com, sent, PARADOR_COM_PAYLOAD + 1), EMSGSIZE);
	REFUSED(write(com, (void *)-PAGE, 1), EFAULT);
}

/* The free area: the same memory on both sides. */
static volatile uint64_t *area;
static size_t words;

static void free_area(void)
{
	struct parador_com_info info;
	size_t index;

	CHECK(ioctl(com, PARADOR_COM_INFO, &info) == 0 && info.area > PAGE);
	words = info.area / sizeof(*area);
	REFUSED(mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE, com, 0), EINVAL);
	REFUSED(mmap(NULL, info.area + PAGE, PROT_READ, MAP_SHARED, com, 0), EINVAL);
	REFUSED(mmap(NULL, PAGE, PROT_READ, MAP_SHARED, com, info.area), EINVAL);
	area = mmap(NULL, info.area, PROT_READ | PROT_WRITE, MAP_SHARED, com, 0);
	CHECK(area != MAP_FAILED);
	meet();
	for (index = side; index < words; index += 2)
		area[index] = mix(0, index);
	meet();
	for (index = 0; index < words; index++)
		CHECK(area[index] == mix(0, index));
	meet();
}

/* A full ring loses nothing, and who waits for room is woken. */
static void full_ring(void)
{
	uint32_t number, got;

	area[0] = 0;
	meet();
	if (side == 0) {
		set_waiting(false);
		for (number = 0; number < ENTRIES; number++)
			CHECK(write(com, &number, sizeof(number)) == sizeof(number));
		REFUSED(write(com, &number, sizeof(number)), EAGAIN);
		CHECK(!(ready(POLLOUT) & POLLOUT));
		set_waiting(true);
		/* There is no room to tell it in a message. */
		area[0] = 1;
		CHECK(write(com, &number, sizeof(number)) == sizeof(number));
	} else {
		while (area[0] != 1)
			usleep(1000);
		for (number = 0; number <= ENTRIES; number++)
			CHECK(read(com, &got, sizeof(got)) == sizeof(got) && got == number);
	}
	meet();
}

/*
 * ---- shares
 * ----------------------------------------------------------------------------------------------
 */

static struct parador_com_list shares(void)
{
	struct parador_com_list list;

	CHECK(ioctl(com, PARADOR_COM_LIST, &list) == 0);
	return list;
}

/*
 * Waits until one of the own, or of the peer's, has a state. Changes that come while this looks
 * wake it.
 */
static void wait_for_own(unsigned int share, enum parador_com_state state)
{
	while (shares().own[share].state != state)
		wait_until(POLLPRI);
}

static void wait_for_peers(unsigned int share, enum parador_com_state state)
{
	while (shares().peers[share].state != state)
		wait_until(POLLPRI);
}

static int offer(int file, unsigned int share, void *address, size_t length, unsigned int flags)
{
	struct parador_com_offer offer = {
		.share = share, .flags = flags, .address = (uintptr_t)address, .length = length
	};

	return ioctl(file, PARADOR_COM_OFFER, &offer);
}

static int take_back(int file, unsigned int share)
{
	return ioctl(file, PARADOR_COM_REVOKE, &share);
}

static void *map(unsigned int share, size_t length, int rights)
{
	return mmap(NULL, length, rights, MAP_SHARED, com, PARADOR_COM_SHARE(share));
}

/* KiB of this program that count as locked. */
static unsigned long locked(void)
{
	FILE *status = fopen("/proc/self/status", "r");
	unsigned long found = 0;
	char line[128];

	CHECK(status);
	while (fgets(line, sizeof(line), status))
		sscanf(line, "VmLck: %lu", &found);
	fclose(status);
	return found;
}

/* The number of large pages is to be this one. */
static void set_huge_pages(char number)
{
	int file = open("/proc/sys/vm/nr_hugepages", O_RDWR);
	char is;

	CHECK(file >= 0 && write(file, &number, 1) == 1);
	CHECK(pread(file, &is, 1, 0) == 1 && is == number);
	close(file);
}

/* Memory whose pages are next to each other for the device, too. */
static volatile uint64_t *one_piece(void)
{
	void *memory;

	set_huge_pages('1');
	memory = mmap(NULL, HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB, -1, 0);
	CHECK(memory != MAP_FAILED);
	memset(memory, 0, HUGE_PAGE);
	return memory;
}

/* What cannot be offered, and that nothing stays pinned after it. */
static void bad_offers(void *memory)
{
	char *pages = mmap(NULL, 5 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	bool scattered;

	CHECK(pages != MAP_FAILED);
	REFUSED(offer(com, PARADOR_COM_SHARES, memory, PAGE, 0), EINVAL);
	REFUSED(offer(com, SHARE, memory, PAGE, 4), EINVAL);
	REFUSED(offer(com, SHARE, memory, 0, 0), EINVAL);
	REFUSED(offer(com, SHARE, memory, PAGE / 2, 0), EINVAL);
	REFUSED(offer(com, SHARE, (char *)memory + 8, PAGE, 0), EINVAL);
	REFUSED(offer(com, SHARE, memory, PARADOR_COM_SHARE_BYTES + PAGE, 0), EINVAL);
	REFUSED(offer(com, SHARE, (void *)-PAGE, PAGE, 0), EFAULT);
	REFUSED(ioctl(com, PARADOR_COM_OFFER, NULL), EFAULT);
	REFUSED(take_back(com, SHARE), ENOENT);
	REFUSED(take_back(com, PARADOR_COM_SHARES), EINVAL);
	/* Half of it is there. */
	CHECK(munmap(pages + PAGE, PAGE) == 0);
	REFUSED(offer(com, SHARE, pages, 2 * PAGE, 0), EFAULT);
	/*
	 * What cannot be written cannot be offered, not even to read; nor can memory of a device.
	 */
	CHECK(mprotect(pages, PAGE, PROT_READ) == 0);
	REFUSED(offer(com, SHARE, pages, PAGE, 0), EFAULT);
	REFUSED(offer(com, SHARE, (void *)area, PAGE, 0), EFAULT);
	/* Two pages can be next to each other in one order only. */
	pages += 2 * PAGE;
	memset(pages, 1, 2 * PAGE);
	scattered = offer(com, SHARE, pages, 2 * PAGE, 0) == -1;
	CHECK(scattered ? errno == E2BIG : take_back(com, SHARE) == 0);
	pages = mremap(pages, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, pages + 2 * PAGE);
	CHECK(pages != MAP_FAILED);
	if (!scattered)
		REFUSED(offer(com, SHARE, pages - PAGE, 2 * PAGE, 0), E2BIG);
	CHECK(locked() == 0);
}

/* A program's limit of locked memory holds. */
static void limit(void)
{
	int status;
	pid_t child = fork();

	CHECK(child >= 0);
	if (child == 0) {
		const struct rlimit one_page = { PAGE, PAGE };
		char *pages = aligned_alloc(PAGE, 2 * PAGE);

		CHECK(pages && setrlimit(RLIMIT_MEMLOCK, &one_page) == 0 && setuid(UNPRIVILEGED_UID) == 0);
		memset(pages, 1, 2 * PAGE);
		REFUSED(offer(com, SHARE, pages, 2 * PAGE, 0), ENOMEM);
		CHECK(offer(com, SHARE, pages, PAGE, 0) == 0 && locked() == PAGE >> 10);
		REFUSED(offer(com, OTHER, pages, PAGE, 0), ENOMEM);
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	/* The file that offered it is this program's, too. */
	CHECK(shares().own[SHARE].state == PARADOR_COM_OFFERED && take_back(com, SHARE) == 0);
}

static void fill(volatile uint64_t *memory, uint64_t seed)
{
	for (size_t index = 0; index < SHARED / sizeof(*memory); index++)
		memory[index] = mix(seed, index);
}

static bool is_filled(const volatile uint64_t *memory, uint64_t seed)
{
	for (size_t index = 0; index < SHARED / sizeof(*memory); index++)
		if (memory[index] != mix(seed, index))
			return false;
	return true;
}

/* The side that shares. */
static void own_share(void)
{
	/* Not at the beginning of a large page. */
	volatile uint64_t *memory = one_piece() + 3 * PAGE / sizeof(*memory);
	int other = open(DEVICE, O_RDWR);

	CHECK(other >= 0);
	bad_offers((void *)memory);
	limit();

	fill(memory, 1);
	CHECK(offer(com, SHARE, (void *)memory, SHARED, PARADOR_COM_WRITABLE) == 0);
	REFUSED(offer(com, SHARE, (void *)memory, SHARED, 0), EBUSY);
	REFUSED(take_back(other, SHARE), ENOENT);
	CHECK(locked() == SHARED >> 10);
	tell();
	expect();
	CHECK(is_filled(memory, 2));
	CHECK(shares().own[SHARE].state == PARADOR_COM_MAPPED);
	CHECK(take_back(com, SHARE) == 0 && locked() == 0);
	CHECK(shares().own[SHARE].state == PARADOR_COM_NONE);
	tell();
	expect();
	CHECK(is_filled(memory, 2));

	/* Once more, to read; it ends with the file. */
	fill(memory, 3);
	CHECK(offer(other, SHARE, (void *)memory, SHARED, 0) == 0);
	tell();
	expect();
	wait_for_own(SHARE, PARADOR_COM_OFFERED);
	tell();
	expect();
	wait_for_own(SHARE, PARADOR_COM_MAPPED);
	CHECK(close(other) == 0 && locked() == 0);
	CHECK(shares().own[SHARE].state == PARADOR_COM_NONE);
	CHECK(is_filled(memory, 3));
	tell();
	expect();
	CHECK(munmap((void *)((uintptr_t)memory & -HUGE_PAGE), HUGE_PAGE) == 0);
	/* A page that was still pinned would not go back. */
	set_huge_pages('0');
}

static sigjmp_buf before;

static void on_signal(int signal)
{
	siglongjmp(before, signal);
}

/* An access ends with SIGBUS. */
static bool is_gone(volatile uint64_t *memory)
{
	if (sigsetjmp(before, 1))
		return true;
	(void)memory[5];
	return false;
}

/* The side that maps. */
static void use_share(void)
{
	volatile uint64_t *memory, *again;
	struct parador_com_share share;
	int status;
	pid_t child;

	expect();
	REFUSED(map(OTHER, PAGE, PROT_READ), ENXIO);
	REFUSED(map(PARADOR_COM_SHARES, PAGE, PROT_READ), EINVAL);
	REFUSED(map(SHARE, SHARED + PAGE, PROT_READ), EINVAL);
	REFUSED(mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE, com, PARADOR_COM_SHARE(SHARE)), EINVAL);
	memory = map(SHARE, SHARED, PROT_READ | PROT_WRITE);
	CHECK(memory != MAP_FAILED && is_filled(memory, 1));
	share = shares().peers[SHARE];
	CHECK(share.state == PARADOR_COM_MAPPED && share.flags == PARADOR_COM_WRITABLE && share.length == SHARED);
	/* It cannot be offered further, since it is no memory of this machine. */
	REFUSED(offer(com, SHARE, (void *)memory, PAGE, 0), EFAULT);
	/* A part of it, and a child's, are the same. */
	again = mmap(NULL, PAGE, PROT_READ, MAP_SHARED, com, PARADOR_COM_SHARE(SHARE) + PAGE);
	CHECK(again != MAP_FAILED);
	child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		fill(memory, 2);
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	CHECK(is_filled(memory, 2) && again[7] == memory[PAGE / sizeof(*memory) + 7]);
	CHECK(munmap((void *)again, PAGE) == 0 && is_filled(memory, 2));
	tell();
	expect();
	wait_for_peers(SHARE, PARADOR_COM_NONE);
	CHECK(is_gone(memory));
	REFUSED(map(SHARE, PAGE, PROT_READ), ENXIO);
	tell();
	expect();
	CHECK(is_gone(memory));
	REFUSED(map(SHARE, SHARED, PROT_READ | PROT_WRITE), EACCES);
	again = map(SHARE, SHARED, PROT_READ);
	CHECK(again != MAP_FAILED && is_filled(again, 3));
	REFUSED(mprotect((void *)again, PAGE, PROT_READ | PROT_WRITE), EACCES);
	/* The previous share does not return with it. */
	CHECK(is_gone(memory) && munmap((void *)memory, SHARED) == 0 && is_filled(again, 3));
	CHECK(shares().peers[SHARE].flags == 0);
	/* What is mapped in pieces is let go with the last one. */
	CHECK(munmap((void *)(again + PAGE / sizeof(*again)), PAGE) == 0 && again[3] == mix(3, 3));
	CHECK(munmap((void *)again, SHARED) == 0);
	tell();
	expect();
	again = map(SHARE, SHARED, PROT_READ);
	CHECK(again != MAP_FAILED && is_filled(again, 3));
	tell();
	expect();
	wait_for_peers(SHARE, PARADOR_COM_NONE);
	CHECK(is_gone(again));
	tell();
}

/*
 * ---- the driver lets go
 * -----------------------------------------------------------------------------------
 */

static void write_text(const char *path, const char *text)
{
	int file = open(path, O_WRONLY);

	CHECK(file >= 0 && write(file, text, strlen(text)) == (ssize_t)strlen(text));
	close(file);
}

/* The device is taken from the driver while programs have it open and mapped, and given back. */
static void unbinding(void)
{
	char target[256], *name;
	volatile uint64_t *part;
	ssize_t length = readlink("/sys/class/misc/parador-com0/device", target, sizeof(target) - 1);
	struct parador_com_info info;
	int other = open(DEVICE, O_RDWR);

	CHECK(length > 0 && other >= 0);
	target[length] = 0;
	name = strrchr(target, '/');
	CHECK(name);
	name++;
	/* Of another file, cut in two, and one page not touched so far. */
	part = mmap(NULL, 3 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, other, 0);
	CHECK(part != MAP_FAILED && part[7] == area[7] && !is_gone(part));
	CHECK(munmap((void *)(part + PAGE / sizeof(*part)), PAGE) == 0);
	/* Each side waits until its peer has finished this step. */
	meet();

	write_text(DRIVER "unbind", name);
	CHECK(is_gone(area) && is_gone(part) && is_gone(part + 2 * PAGE / sizeof(*part)));
	REFUSED(mmap(NULL, PAGE, PROT_READ, MAP_SHARED, com, 0), ENODEV);
	REFUSED(map(SHARE, PAGE, PROT_READ), ENODEV);
	REFUSED(ioctl(com, PARADOR_COM_INFO, &info), ENODEV);
	REFUSED(write(com, "", 0), ENODEV);
	CHECK(ready(POLLIN) & POLLHUP);

	write_text(DRIVER "bind", name);
	CHECK(is_gone(area) && is_gone(part));
	CHECK(close(other) == 0 && close(com) == 0 && munmap((void *)part, PAGE) == 0);
	CHECK(munmap((void *)(part + 2 * PAGE / sizeof(*part)), PAGE) == 0);
	com = open(DEVICE, O_RDWR);
	CHECK(com >= 0 && ioctl(com, PARADOR_COM_INFO, &info) == 0 && info.side == side);
	part = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, com, 0);
	CHECK(part != MAP_FAILED && !is_gone(part));
}

int main(void)
{
	const struct sigaction action = { .sa_handler = on_signal };

	com = open(DEVICE, O_RDWR);
	CHECK(com >= 0);
	CHECK(sigaction(SIGBUS, &action, NULL) == 0);
	identities();
	/* One after the other, while no side sends. */
	if (side == 0)
		expect();
	nothing();
	if (side == 1)
		tell();
	meet();
	lengths();
	free_area();
	full_ring();
	if (side == 0) {
		own_share();
		use_share();
	} else {
		use_share();
		own_share();
	}
	unbinding();
	printf("%s works\n", DEVICE);
	return 0;
}
