// SPDX-License-Identifier: Apache-2.0
// Sockets between a guest and its host (AF_VSOCK), for tests.
//
//	vsock listen PORT COUNT  accepts COUNT connections of the host, concurrently, and echoes each
//	vsock connect PORT       connects to the host, sends standard input, shuts that direction
//	                         down, and prints the answer
//	vsock flood PORT         sends to the host until that fails, and prints the error
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <linux/vm_sockets.h>
#include <unistd.h>

static void fail(const char *what)
{
	printf("vsock: %s: %s\n", what, strerror(errno));
	exit(1);
}

// Until the end of what comes; 0: it was the end.
static int copy(int from, int to)
{
	static __thread char buffer[50000];
	ssize_t length;

	while ((length = read(from, buffer, sizeof(buffer))) > 0) {
		for (ssize_t done = 0, now; done < length; done += now)
			if ((now = write(to, buffer + done, length - done)) < 0)
				return -1;
	}
	return length;
}

static int stream(void)
{
	int fd = socket(AF_VSOCK, SOCK_STREAM, 0);

	if (fd < 0)
		fail("socket");
	return fd;
}

static void listen_at(struct sockaddr_vm *address, int count)
{
	int fd = stream(), lost = 0, status;

	address->svm_cid = VMADDR_CID_ANY;
	if (bind(fd, (struct sockaddr *)address, sizeof(*address)) || listen(fd, 16))
		fail("listen");
	for (int number = 0; number < count; number++) {
		int one = accept(fd, NULL, NULL);

		if (one < 0)
			fail("accept");
		if (fork() == 0)
			_exit(copy(one, one) ? 1 : 0);
		close(one);
	}
	while (wait(&status) > 0)
		lost += status != 0;
	printf("vsock: %d connections, %d lost\n", count, lost);
}

static void *send_input(void *fd)
{
	if (copy(0, *(int *)fd))
		fail("send");
	if (shutdown(*(int *)fd, SHUT_WR))
		fail("shutdown");
	return NULL;
}

int main(int argc, char **argv)
{
	struct sockaddr_vm address = { .svm_family = AF_VSOCK, .svm_cid = VMADDR_CID_HOST };
	pthread_t sender;
	int fd;

	if (argc < 3)
		return 2;
	signal(SIGPIPE, SIG_IGN);
	address.svm_port = strtoul(argv[2], NULL, 0);
	if (!strcmp(argv[1], "listen")) {
		listen_at(&address, argc > 3 ? atoi(argv[3]) : 1);
		return 0;
	}
	fd = stream();
	if (connect(fd, (struct sockaddr *)&address, sizeof(address)))
		fail("connect");
	if (!strcmp(argv[1], "flood")) {
		static char zeros[100000];

		while (write(fd, zeros, sizeof(zeros)) > 0)
			;
		fail("flood");
	}
	if (pthread_create(&sender, NULL, send_input, &fd))
		fail("thread");
	if (copy(fd, 1))
		fail("receive");
	pthread_join(sender, NULL);
	return 0;
}
