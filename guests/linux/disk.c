// SPDX-License-Identifier: Apache-2.0
// Reads a disk while it is busy with writes, and reports whether the read waited for them.
//
//	disk NAME MIB  zeroes MIB MiB of /dev/NAME, from its second half on, and reads its first page
//	               meanwhile
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

static void fail(const char *what)
{
	printf("disk: %s: %s\n", what, strerror(errno));
	exit(1);
}

// Requests that write (zeros are), and that are on their way.
static unsigned int in_flight(const char *name)
{
	unsigned int reads, writes;
	char path[99];
	FILE *file;

	snprintf(path, sizeof(path), "/sys/block/%s/inflight", name);
	file = fopen(path, "r");
	if (!file || fscanf(file, "%u %u", &reads, &writes) != 2)
		fail(path);
	fclose(file);
	return writes;
}

int main(int count, char **words)
{
	uint64_t size, range[2];
	char path[99];
	void *page;
	pid_t child;
	int disk, status, is_free;

	if (count != 3)
		return 2;
	snprintf(path, sizeof(path), "/dev/%s", words[1]);
	disk = open(path, O_RDWR | O_DIRECT);
	page = aligned_alloc(4096, 4096);
	if (disk < 0 || !page || ioctl(disk, BLKGETSIZE64, &size) < 0)
		fail(path);
	range[0] = size / 2;
	range[1] = strtoull(words[2], NULL, 0) << 20;

	child = fork();
	if (child < 0)
		fail("fork");
	if (!child) {
		if (ioctl(disk, BLKZEROOUT, range) < 0)
			fail("BLKZEROOUT");
		_exit(0);
	}
	while (!in_flight(words[1]))
		if (waitpid(child, &status, WNOHANG) == child) {
			printf("disk: the zeros were never seen on their way\n");
			return 1;
		}
	if (pread(disk, page, 4096, 0) != 4096)
		fail("pread");
	is_free = in_flight(words[1]) != 0;
	if (waitpid(child, &status, 0) != child || status)
		fail("waitpid");
	printf("disk: a read %s zeros\n", is_free ? "beside" : "after");
	return 0;
}
