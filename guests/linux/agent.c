// SPDX-License-Identifier: Apache-2.0
// Agent of a guest (proto/src/agent.rs) that breaks the protocol, for the tests of `parador oci`. A
// test writes one of these words over `mode`, and marks the program with the release:
//
//	version  the first answer has another version
//	silence  nothing listens
//	create   the answer to Create is malformed
//	run      a message that is too long follows the answer to Run
//
// Processes of their own serve the connections, until the VM ends.
#include <linux/vm_sockets.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define PORT 1024

// Indices of messages and of their variants, as postcard writes them.
#define PURPOSE_STREAM 1
#define REQUEST_CREATE 2
#define REQUEST_RUN 4
#define ANSWER_WELCOME 0
#define ANSWER_DONE 1

static const volatile char mode[16] __attribute__((section("hostile_mode"))) = "none";

static int is_mode(const char *word)
{
	return !strcmp((const char *)mode, word);
}

static void take(int fd, void *bytes, size_t length)
{
	for (size_t done = 0; done < length;) {
		ssize_t count = read(fd, (char *)bytes + done, length - done);
		if (count <= 0)
			exit(1);
		done += (size_t)count;
	}
}

// Receives a message; returns its first bytes.
static void receive(int fd, uint8_t first[2])
{
	uint32_t length;
	uint8_t byte;

	take(fd, &length, sizeof(length));
	for (uint32_t index = 0; index < length; index++) {
		take(fd, &byte, 1);
		if (index < 2)
			first[index] = byte;
	}
}

static void answer(int fd, const void *bytes, uint32_t length)
{
	if (write(fd, &length, sizeof(length)) < 0 || write(fd, bytes, length) < 0)
		exit(1);
}

static void serve(int fd)
{
	static const uint8_t done[] = { ANSWER_DONE };
	static const uint8_t wrong[] = { 0xff, 0xff };
	static const uint8_t long_message[8] = { 0xff, 0xff, 0xff, 0xff };
	uint8_t first[2] = { 0 };

	receive(fd, first);
	uint8_t version = is_mode("version") ? 99 : first[0];
	uint8_t welcome[] = { ANSWER_WELCOME, version, 1 };
	answer(fd, welcome, sizeof(welcome));
	// A stream carries bytes only.
	while (first[1] == PURPOSE_STREAM)
		pause();
	for (;;) {
		receive(fd, first);
		if (is_mode("create") && first[0] == REQUEST_CREATE)
			answer(fd, wrong, sizeof(wrong));
		else
			answer(fd, done, sizeof(done));
		if (is_mode("run") && first[0] == REQUEST_RUN && write(fd, long_message, 8) < 0)
			exit(1);
	}
}

int main(void)
{
	struct sockaddr_vm address = {
		.svm_family = AF_VSOCK, .svm_port = PORT, .svm_cid = VMADDR_CID_ANY
	};

	while (is_mode("silence"))
		pause();
	int listener = socket(AF_VSOCK, SOCK_STREAM, 0);
	if (bind(listener, (struct sockaddr *)&address, sizeof(address)) || listen(listener, 8))
		return 1;
	for (;;) {
		int fd = accept(listener, NULL, NULL);
		if (fd < 0)
			return 1;
		if (!fork())
			serve(fd);
		close(fd);
	}
}
