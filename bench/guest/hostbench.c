/* Microbenchmarks in microseconds: medians of several rounds. Runs natively and in guests.
 *
 * Arguments: names of rows; none: the first five. `receive` connects to the server that the
 * environment variable HB_SERVER="ADDRESS PORT" names. HB_ROUNDS sets the number of rounds. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { ROUNDS = 9 };

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

static double null_call(void)
{
	enum { N = 20000 };
	double start = now();
	for (int i = 0; i < N; i++)
		syscall(SYS_getppid);
	return (now() - start) / N;
}

static double fork_wait(void)
{
	enum { N = 100 };
	double start = now();
	for (int i = 0; i < N; i++) {
		pid_t child = fork();
		if (child == 0)
			_exit(0);
		if (child < 0 || waitpid(child, NULL, 0) != child)
			exit(1);
	}
	return (now() - start) / N;
}

static double pipe_round_trip(void)
{
	enum { N = 1000 };
	int there[2], back[2];
	char byte = 0;
	if (pipe(there) || pipe(back))
		exit(1);
	pid_t child = fork();
	if (child == 0) {
		for (int i = 0; i < N + 1; i++)
			if (read(there[0], &byte, 1) != 1 || write(back[1], &byte, 1) != 1)
				_exit(1);
		_exit(0);
	}
	double start = 0;
	for (int i = 0; i < N + 1; i++) {
		if (i == 1)
			start = now();
		if (write(there[1], &byte, 1) != 1 || read(back[0], &byte, 1) != 1)
			exit(1);
	}
	double time = (now() - start) / N;
	waitpid(child, NULL, 0);
	close(there[0]), close(there[1]), close(back[0]), close(back[1]);
	return time;
}

static double touch_page(void)
{
	enum { PAGES = 2048 };
	char *memory = mmap(NULL, PAGES * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED)
		exit(1);
	double start = now();
	for (int i = 0; i < PAGES; i++)
		memory[i * 4096] = 1;
	double time = (now() - start) / PAGES;
	munmap(memory, PAGES * 4096);
	return time;
}

/* Branches and memory, floating point, integers: a heap sort, a matrix product, a hash. */
static double compute(void)
{
	enum { HEAP = 1 << 15, SIDE = 96, HASHES = 24 };
	static unsigned heap[HEAP];
	static double a[SIDE][SIDE], b[SIDE][SIDE], c[SIDE][SIDE];
	unsigned value = 1, hash = 2166136261u;
	double start = now();
	for (int i = 0; i < HEAP; i++)
		heap[i] = value = value * 1664525 + 1013904223;
	for (int count = HEAP, first = HEAP / 2; count > 1;) {
		unsigned moved;
		if (first > 0) {
			moved = heap[--first];
		} else {
			moved = heap[--count];
			heap[count] = heap[0];
		}
		int at = first;
		for (int child; (child = 2 * at + 1) < count; at = child) {
			child += child + 1 < count && heap[child + 1] > heap[child];
			if (heap[child] <= moved)
				break;
			heap[at] = heap[child];
		}
		heap[at] = moved;
	}
	for (int i = 0; i < SIDE; i++)
		for (int j = 0; j < SIDE; j++) {
			a[i][j] = heap[i * SIDE + j] / 4294967296.0;
			b[i][j] = heap[j * SIDE + i] / 4294967296.0;
			c[i][j] = 0;
		}
	for (int i = 0; i < SIDE; i++)
		for (int k = 0; k < SIDE; k++)
			for (int j = 0; j < SIDE; j++)
				c[i][j] += a[i][k] * b[k][j];
	for (int round = 0; round < HASHES; round++)
		for (unsigned char *byte = (unsigned char *)heap; byte < (unsigned char *)(heap + HEAP); byte++)
			hash = (hash ^ *byte) * 16777619u;
	double time = now() - start;
	/* Uses the results, so that the compiler keeps the computation. */
	if (heap[0] > heap[HEAP - 1] || c[1][1] <= 0 || hash == 0)
		exit(1);
	return time;
}

/* Two processes with 64 KiB each, which they read, take turns: the time of one turn. */
static double switch_64k(void)
{
	enum { N = 500, WORDS = 65536 / sizeof(unsigned) };
	int there[2], back[2];
	static volatile unsigned data[WORDS];
	char byte = 0;
	if (pipe(there) || pipe(back))
		exit(1);
	pid_t child = fork();
	int from = child ? back[0] : there[0], to = child ? there[1] : back[1];
	double start = 0;
	for (int i = 0; i < WORDS; i++)
		data[i] = i;
	for (int i = 0; i < N + 1; i++) {
		if (i == 1)
			start = now();
		if (child == 0 && read(from, &byte, 1) != 1)
			_exit(1);
		for (int word = 0; word < WORDS; word++)
			data[word];
		if (write(to, &byte, 1) != 1 || (child && read(from, &byte, 1) != 1))
			_exit(1);
	}
	double time = (now() - start) / (2 * N);
	if (child == 0)
		_exit(0);
	waitpid(child, NULL, 0);
	close(there[0]), close(there[1]), close(back[0]), close(back[1]);
	return time;
}

/* 10 MiB by TCP. */
static double receive(void)
{
	static char buffer[1 << 16];
	char address[64] = "";
	int port = 0;
	const char *server = getenv("HB_SERVER");
	struct sockaddr_in to = { .sin_family = AF_INET };
	if (!server || sscanf(server, "%63s %d", address, &port) != 2 || !inet_pton(AF_INET, address, &to.sin_addr))
		exit(1);
	to.sin_port = htons(port);
	int connection = socket(AF_INET, SOCK_STREAM, 0);
	double start = now();
	if (connection < 0 || connect(connection, (struct sockaddr *)&to, sizeof(to)))
		exit(1);
	size_t all = 0;
	for (ssize_t part; (part = read(connection, buffer, sizeof(buffer))) > 0;)
		all += part;
	double time = now() - start;
	close(connection);
	if (all != 10 << 20)
		exit(1);
	return time;
}

static int ascending(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

int main(int count, char **names)
{
	static const struct { const char *name; double (*run)(void); } rows[] = {
		{ "null_syscall", null_call }, { "fork", fork_wait }, { "pipe", pipe_round_trip },
		{ "touch", touch_page }, { "compute", compute }, { "switch", switch_64k }, { "receive", receive },
	};
	const char *enough = getenv("HB_ROUNDS");
	int rounds = enough ? atoi(enough) : ROUNDS;
	if (rounds < 1 || rounds > ROUNDS)
		exit(1);
	for (unsigned row = 0; row < sizeof(rows) / sizeof(*rows); row++) {
		int wanted = count < 2 && row < 5;
		for (int name = 1; name < count; name++)
			wanted |= !strcmp(names[name], rows[row].name);
		if (!wanted)
			continue;
		double times[ROUNDS];
		for (int round = 0; round < rounds; round++)
			times[round] = rows[row].run();
		qsort(times, rounds, sizeof(*times), ascending);
		printf("HB %s %.4f %.4f %.4f\n", rows[row].name, times[rounds / 2], times[0], times[rounds - 1]);
		fflush(stdout);
	}
	return 0;
}
