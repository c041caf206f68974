/* data - moves data in a guest, between marks that an emulator counts (bench/plugin).
 *
 *   data read DEVICE COUNT    COUNT random reads of 4 KiB of a disk, queue depth 1, O_DIRECT
 *   data serve                takes what one peer sends by TCP, and answers its end with a byte
 *   data send ADDRESS COUNT   sends COUNT MiB to it and waits for the answer
 *   data compute COUNT        COUNT million rounds of arithmetic
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <unistd.h>

#include "mark.h"

#define BLOCK 4096
#define PIECE (128 << 10)
#define PORT 7000
/* What is done first and not counted: caches fill, a TCP window opens. */
#define WARM_BLOCKS 50
#define WARM_MIB 4

static char buffer[PIECE] __attribute__((aligned(BLOCK)));

static void fail(const char *what)
{
	perror(what);
	exit(1);
}

/* The places are the same in every run. */
static uint32_t next(uint32_t *state)
{
	*state ^= *state << 13;
	*state ^= *state >> 17;
	*state ^= *state << 5;
	return *state;
}

static void read_blocks(int disk, uint64_t blocks, long count, uint32_t *state)
{
	for (; count; count--)
		if (pread(disk, buffer, BLOCK, next(state) % blocks * BLOCK) != BLOCK)
			fail("read");
}

static void read_device(const char *device, long count)
{
	uint64_t bytes;
	uint32_t state = 1;
	int disk = open(device, O_RDONLY | O_DIRECT);

	if (disk < 0 || ioctl(disk, BLKGETSIZE64, &bytes) < 0)
		fail(device);
	read_blocks(disk, bytes / BLOCK, WARM_BLOCKS, &state);
	MARK(START);
	read_blocks(disk, bytes / BLOCK, count, &state);
	MARK(END);
}

static struct sockaddr_in place(const char *address)
{
	struct sockaddr_in place = { .sin_family = AF_INET, .sin_port = htons(PORT) };

	inet_aton(address, &place.sin_addr);
	return place;
}

/* Takes `bytes` bytes, fewer at the end; whether there were as many. */
static int take(int from, uint64_t bytes)
{
	while (bytes) {
		ssize_t count = read(from, buffer, bytes < PIECE ? bytes : PIECE);
		if (count < 0)
			fail("receive");
		if (!count)
			return 0;
		bytes -= count;
	}
	return 1;
}

static void answer(int to)
{
	if (write(to, "", 1) != 1)
		fail("answer");
}

static void serve(void)
{
	struct sockaddr_in any = place("0.0.0.0");
	int one = 1, from, listener = socket(AF_INET, SOCK_STREAM, 0);

	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	if (bind(listener, (struct sockaddr *)&any, sizeof(any)) < 0 || listen(listener, 1) < 0)
		fail("listen");
	from = accept(listener, NULL, NULL);
	if (from < 0)
		fail("accept");
	if (!take(from, (uint64_t)WARM_MIB << 20))
		fail("warm up");
	answer(from);
	take(from, UINT64_MAX);
	answer(from);
}

static void give(int to, long mib)
{
	for (uint64_t left = (uint64_t)mib << 20; left; ) {
		ssize_t count = write(to, buffer, left < PIECE ? left : PIECE);
		if (count < 0)
			fail("send");
		left -= count;
	}
}

static void send_to(const char *address, long mib)
{
	struct sockaddr_in peer = place(address);
	char byte;
	int to, tries = 200;

	for (;;) {
		to = socket(AF_INET, SOCK_STREAM, 0);
		if (!connect(to, (struct sockaddr *)&peer, sizeof(peer)))
			break;
		if (!--tries)
			fail("connect");
		close(to);
		usleep(200000);
	}
	give(to, WARM_MIB);
	if (read(to, &byte, 1) != 1)
		fail("first answer");
	MARK(START);
	give(to, mib);
	shutdown(to, SHUT_WR);
	if (read(to, &byte, 1) != 1)
		fail("answer");
	MARK(END);
}

static void compute(long millions)
{
	uint64_t value = 1;

	MARK(START);
	for (uint64_t left = millions * 1000000ull; left; left--) {
		value = value * 6364136223846793005ull + left;
		__asm__ volatile("" : "+r"(value));
	}
	MARK(END);
}

int main(int count, char **words)
{
	const char *what = count > 1 ? words[1] : "";

	if (!strcmp(what, "read") && count == 4)
		read_device(words[2], atol(words[3]));
	else if (!strcmp(what, "serve"))
		serve();
	else if (!strcmp(what, "send") && count == 4)
		send_to(words[2], atol(words[3]));
	else if (!strcmp(what, "compute") && count == 3)
		compute(atol(words[2]));
	else
		return 2;
	puts("data: done");
	return 0;
}
