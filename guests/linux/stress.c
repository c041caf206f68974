// SPDX-License-Identifier: Apache-2.0
// What a kernel does for programs, done over and over at once, with checks: `stress SECONDS` starts
// a process for each kind of work and ends with 0 if none has found anything wrong. `stress crash
// WAY` ends by a signal of the processor, `stress faults` counts the page faults of changed data.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096

static const char *kind = "stress", *self;
static time_t end;

// The failed check, its place, and the end.
#define CHECK(condition) \
	do { \
		if (!(condition)) { \
			fprintf(stderr, "stress: %s: line %d: %s (errno %d)\n", kind, __LINE__, #condition, errno); \
			_exit(1); \
		} \
	} while (0)

static time_t now(void)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec;
}

static uint64_t mix(uint64_t x)
{
	x ^= x >> 31;
	x *= 0x9e3779b97f4a7c15;
	return x ^ x >> 29;
}

static void fill(uint64_t *words, size_t bytes, uint64_t seed)
{
	for (size_t i = 0; i < bytes / 8; i++)
		words[i] = mix(seed + i);
}

static int holds(const uint64_t *words, size_t bytes, uint64_t seed)
{
	for (size_t i = 0; i < bytes / 8; i++)
		if (words[i] != mix(seed + i))
			return 0;
	return 1;
}

static void reap(pid_t child, int code)
{
	int status = 0;
	CHECK(waitpid(child, &status, 0) == child);
	CHECK(WIFEXITED(status) && WEXITSTATUS(status) == code);
}

// Children see what their parent had when they were made, and keep their changes to themselves.
static void forks(uint64_t round)
{
	static uint64_t words[16 * PAGE / 8];
	fill(words, sizeof(words), round);
	pid_t children[4];
	for (int i = 0; i < 4; i++) {
		CHECK((children[i] = fork()) >= 0);
		if (!children[i]) {
			CHECK(holds(words, sizeof(words), round));
			fill(words, sizeof(words), round + i + 1);
			sched_yield();
			CHECK(holds(words, sizeof(words), round + i + 1));
			_exit(i + 7);
		}
	}
	for (int i = 0; i < 4; i++)
		reap(children[i], i + 7);
	CHECK(holds(words, sizeof(words), round));
}

// exec: the new program prints its arguments.
static void execs(uint64_t round)
{
	int ends[2];
	char number[24], told[64] = "";
	snprintf(number, sizeof(number), "%llu", (unsigned long long)mix(round));
	CHECK(!pipe(ends));
	pid_t child = fork();
	CHECK(child >= 0);
	if (!child) {
		CHECK(dup2(ends[1], 1) == 1);
		execl(self, self, "say", number, (char *)0);
		_exit(1);
	}
	close(ends[1]);
	size_t used = 0;
	for (ssize_t count; (count = read(ends[0], told + used, sizeof(told) - 1 - used)) > 0;)
		used += count;
	close(ends[0]);
	reap(child, 5);
	CHECK(!strcmp(told, number));
}

// Echo of bytes by another process, in pieces of varying length.
static void pipes(uint64_t round)
{
	static uint64_t words[8 * PAGE / 8], back[8 * PAGE / 8];
	int to[2], from[2];
	CHECK(!pipe(to) && !pipe(from));
	pid_t child = fork();
	CHECK(child >= 0);
	if (!child) {
		close(to[1]);
		close(from[0]);
		char buffer[1000];
		for (ssize_t count; (count = read(to[0], buffer, 1 + mix(++round) % sizeof(buffer))) > 0;)
			for (ssize_t done = 0; done < count;) {
				ssize_t put = write(from[1], buffer + done, count - done);
				CHECK(put > 0);
				done += put;
			}
		_exit(3);
	}
	close(to[0]);
	close(from[1]);
	fill(words, sizeof(words), round);
	// Half at a time: both pipes together hold it.
	for (size_t half = 0; half < 2; half++) {
		size_t length = sizeof(words) / 2, got = 0;
		CHECK(write(to[1], (char *)words + half * length, length) == (ssize_t)length);
		while (got < length) {
			ssize_t count = read(from[0], (char *)back + half * length + got, length - got);
			CHECK(count > 0);
			got += count;
		}
	}
	CHECK(!memcmp(words, back, sizeof(words)));
	close(to[1]);
	reap(child, 3);
	close(from[0]);
}

static sigjmp_buf jump;
static volatile uintptr_t fault;

static void on_fault(int signal, siginfo_t *info, void *context)
{
	(void)signal, (void)context;
	fault = (uintptr_t)info->si_addr;
	siglongjmp(jump, 1);
}

static void expect_faults(void)
{
	struct sigaction action = { .sa_sigaction = on_fault, .sa_flags = SA_SIGINFO };
	CHECK(!sigaction(SIGSEGV, &action, NULL));
}

// An access faults, at its own address.
static void faults(volatile char *at, int write)
{
	fault = 0;
	if (!sigsetjmp(jump, 1)) {
		if (write)
			*at = 1;
		else
			(void)*at;
		CHECK(!"an access that is not allowed");
	}
	CHECK(fault == (uintptr_t)at);
}

// Mappings come, move, lose rights, and go; what is gone or forbidden faults.
static void mappings(uint64_t round)
{
	size_t pages = 3 + mix(round) % 60, bytes = pages * PAGE;
	int all = PROT_READ | PROT_WRITE, private = MAP_PRIVATE | MAP_ANONYMOUS;
	expect_faults();
	char *at = mmap(NULL, bytes, all, private, -1, 0);
	CHECK(at != MAP_FAILED);
	CHECK(!at[bytes / 2]);
	fill((uint64_t *)at, bytes, round);
	CHECK(!mprotect(at + PAGE, PAGE, PROT_READ));
	faults(at + PAGE + 8, 1);
	CHECK(!mprotect(at + PAGE, PAGE, PROT_NONE));
	faults(at + PAGE, 0);
	CHECK(!mprotect(at + PAGE, PAGE, all));
	CHECK(holds((uint64_t *)at, bytes, round));
	char *moved = mremap(at, bytes, 2 * bytes, MREMAP_MAYMOVE);
	CHECK(moved != MAP_FAILED);
	CHECK(holds((uint64_t *)moved, bytes, round) && !moved[bytes]);
	CHECK(!madvise(moved, PAGE, MADV_DONTNEED) && !moved[0]);
	CHECK(!munmap(moved, 2 * bytes));
	faults(moved + bytes - 1, 0);

	int file = memfd_create("stress", 0);
	CHECK(file >= 0 && !ftruncate(file, bytes));
	char *shared = mmap(NULL, bytes, all, MAP_SHARED, file, 0);
	char *own = mmap(NULL, bytes, all, MAP_PRIVATE, file, 0);
	CHECK(shared != MAP_FAILED && own != MAP_FAILED);
	fill((uint64_t *)shared, bytes, round);
	CHECK(holds((uint64_t *)own, bytes, round));
	own[PAGE] ^= 1;
	CHECK(holds((uint64_t *)shared, bytes, round));
	pid_t child = fork();
	CHECK(child >= 0);
	if (!child) {
		fill((uint64_t *)shared, bytes, round + 1);
		_exit(9);
	}
	reap(child, 9);
	CHECK(holds((uint64_t *)shared, bytes, round + 1));
	CHECK(!munmap(own, bytes) && !munmap(shared, bytes) && !close(file));
}

enum { CODE = 2, DATA = 40 };

// The segments of a program: two pages that stay as in the file, and data from there to beyond its
// end.
static uint64_t *segments(int file)
{
	char *code = mmap(NULL, (CODE + DATA + 1) * PAGE, PROT_READ, MAP_PRIVATE, file, 0);
	CHECK(code != MAP_FAILED);
	char *data = code + CODE * PAGE;
	CHECK(mmap(data, (DATA + 1) * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, file, CODE * PAGE) == data);
	return (uint64_t *)data;
}

static sigjmp_buf away;

static void on_bus_error(int signal)
{
	siglongjmp(away, signal);
}

// A page of the data does not exist.
static int is_beyond(const uint64_t *data, int page)
{
	if (sigsetjmp(away, 1))
		return 1;
	(void)*(const volatile uint64_t *)&data[page * (PAGE / 8)];
	return 0;
}

// Data that programs change is theirs, what they have not changed is the file's.
static void data(uint64_t round)
{
	static uint64_t words[(CODE + DATA) * PAGE / 8], back[sizeof(words) / 8];
	struct sigaction bus = { .sa_handler = on_bus_error };
	int file = memfd_create("stress", 0);
	CHECK(file >= 0 && !sigaction(SIGBUS, &bus, NULL));
	fill(words, sizeof(words) - PAGE / 2, round);
	memset((char *)words + sizeof(words) - PAGE / 2, 0, PAGE / 2);
	CHECK(write(file, words, sizeof(words) - PAGE / 2) == sizeof(words) - PAGE / 2);
	uint64_t *all = segments(file), *of_file = words + CODE * PAGE / 8;
	for (int i = 0; i < 2 * DATA; i++) {
		uint64_t at = mix(round + i) % (DATA * PAGE / 8);
		CHECK(all[at] == of_file[at]);
		all[at] = of_file[at] = mix(at);
	}
	CHECK(!memcmp(all, of_file, DATA * PAGE) && is_beyond(all, DATA));
	CHECK(pread(file, back, sizeof(back), 0) == sizeof(back) - PAGE / 2);
	CHECK(holds(back, sizeof(back) - PAGE / 2, round));
	pid_t child = fork();
	CHECK(child >= 0);
	if (!child) {
		memset(all, 1, DATA * PAGE);
		_exit(3);
	}
	reap(child, 3);
	CHECK(!memcmp(all, of_file, DATA * PAGE));
	// The file becomes shorter: copies end with it.
	int pages = mix(round) % DATA;
	CHECK(!ftruncate(file, (CODE + pages) * PAGE));
	for (int page = 0; page <= DATA; page++)
		CHECK(is_beyond(all, page) == (page >= pages));
	CHECK(!memcmp(all, of_file, pages * PAGE));
	CHECK(!munmap((char *)all - CODE * PAGE, (CODE + DATA + 1) * PAGE) && !close(file));
}

// Faults of a program that changes all its data.
static int count_faults(void)
{
	struct rusage before, after;
	int file = memfd_create("stress", 0);
	CHECK(file >= 0 && !ftruncate(file, (CODE + DATA) * PAGE));
	for (int page = 0; page < CODE + DATA; page++)
		CHECK(pwrite(file, &page, sizeof(page), page * PAGE) == sizeof(page));
	volatile uint64_t *all = segments(file);
	CHECK(!getrusage(RUSAGE_SELF, &before));
	for (int page = 0; page < DATA; page++)
		all[page * (PAGE / 8)]++;
	CHECK(!getrusage(RUSAGE_SELF, &after));
	printf("stress: %ld faults of %d pages\n", after.ru_minflt - before.ru_minflt, DATA);
	return 0;
}

static volatile sig_atomic_t ticks, calls;

static void on_tick(int signal)
{
	// The handler's own arithmetic must not show in the program's.
	volatile double sum = signal;
	for (int i = 1; i < 50; i++)
		sum = sum / i + i;
	ticks++;
}

static void on_call(int signal)
{
	(void)signal;
	calls++;
}

// Signals of a timer and of another process, while registers are in use.
static void signals(uint64_t round)
{
	struct sigaction tick = { .sa_handler = on_tick, .sa_flags = SA_RESTART };
	struct sigaction call = { .sa_handler = on_call, .sa_flags = SA_RESTART };
	struct itimerval often = { { 0, 1000 }, { 0, 1000 } }, never = { { 0, 0 }, { 0, 0 } };
	CHECK(!sigaction(SIGALRM, &tick, NULL) && !sigaction(SIGUSR1, &call, NULL));
	int ticked = ticks;
	calls = 0;
	CHECK(!setitimer(ITIMER_REAL, &often, NULL));
	pid_t parent = getpid(), child = fork();
	CHECK(child >= 0);
	if (!child) {
		for (int i = 0; i < 20; i++) {
			CHECK(!kill(parent, SIGUSR1));
			usleep(200);
		}
		_exit(2);
	}
	double a = round, b = 1, first = 0;
	uint64_t x = round, chain = 0;
	for (int pass = 0; ticks - ticked < 10; pass++) {
		a = round, b = 1, x = round;
		for (int i = 0; i < 20000; i++) {
			a = a * 1.0000001 + b, b = b * 0.9999999 + 0.5;
			x = mix(x + i);
		}
		if (!pass)
			first = a + b, chain = x;
		CHECK(a + b == first && x == chain);
	}
	CHECK(!setitimer(ITIMER_REAL, &never, NULL));
	reap(child, 2);
	CHECK(calls > 0 && calls <= 20);
}

#define THREADS 4
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t turned = PTHREAD_COND_INITIALIZER;
static int turn, counter;
static __thread uint64_t own;

static void *thread(void *argument)
{
	int number = (intptr_t)argument;
	own = mix(number);
	for (int i = 0; i < 50; i++) {
		CHECK(!pthread_mutex_lock(&lock));
		while (turn != number)
			CHECK(!pthread_cond_wait(&turned, &lock));
		turn = (turn + 1) % THREADS;
		counter++;
		CHECK(!pthread_cond_broadcast(&turned));
		CHECK(!pthread_mutex_unlock(&lock));
		CHECK(own == mix(number));
	}
	return argument;
}

// Threads take turns.
static void threads(uint64_t round)
{
	(void)round;
	pthread_t all[THREADS];
	turn = counter = 0;
	for (intptr_t i = 0; i < THREADS; i++)
		CHECK(!pthread_create(&all[i], NULL, thread, (void *)i));
	for (intptr_t i = 0; i < THREADS; i++) {
		void *result;
		CHECK(!pthread_join(all[i], &result) && result == (void *)i);
	}
	CHECK(counter == 50 * THREADS);
}

// Files are what was written to them.
static void files(uint64_t round)
{
	static uint64_t words[20 * PAGE / 8], back[20 * PAGE / 8];
	char name[64];
	snprintf(name, sizeof(name), "/tmp/stress-%d", (int)getpid());
	int file = open(name, O_RDWR | O_CREAT | O_TRUNC, 0600);
	CHECK(file >= 0);
	fill(words, sizeof(words), round);
	CHECK(write(file, words, sizeof(words)) == sizeof(words));
	CHECK(pread(file, back, sizeof(back), 0) == sizeof(back));
	CHECK(!memcmp(words, back, sizeof(words)));
	char *at = mmap(NULL, sizeof(words), PROT_READ, MAP_SHARED, file, 0);
	CHECK(at != MAP_FAILED && holds((uint64_t *)at, sizeof(words), round));
	CHECK(!munmap(at, sizeof(words)) && !unlink(name) && !close(file));
}

static volatile uint64_t *number_page, *counts;
static uint64_t expected;
static int stop;

static void *watcher(void *argument)
{
	size_t own_count = (uintptr_t)argument * (PAGE / 8);
	while (!__atomic_load_n(&stop, __ATOMIC_ACQUIRE)) {
		uint64_t least = __atomic_load_n(&expected, __ATOMIC_ACQUIRE);
		CHECK(*number_page >= least);
		counts[own_count]++;
		CHECK(!pthread_mutex_lock(&lock));
		counter++;
		CHECK(!pthread_mutex_unlock(&lock));
	}
	return NULL;
}

// What one thread changes of the mappings holds for all at once, on whatever processor they run; a
// child has what its parent's threads had written when it was made, and no more.
static void shootdowns(uint64_t round)
{
	enum { LAST = 40, FORKS = 8 };
	int file = memfd_create("stress", 0), both = PROT_READ | PROT_WRITE;
	CHECK(file >= 0 && !ftruncate(file, (LAST + 1) * PAGE));
	for (uint64_t i = 0; i <= LAST; i++)
		CHECK(pwrite(file, &i, sizeof(i), i * PAGE) == sizeof(i));
	number_page = mmap(NULL, PAGE, PROT_READ, MAP_SHARED, file, 0);
	counts = mmap(NULL, THREADS * PAGE, both, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(number_page != MAP_FAILED && counts != MAP_FAILED);
	counter = stop = expected = 0;
	pthread_t all[THREADS];
	for (uintptr_t i = 0; i < THREADS; i++)
		CHECK(!pthread_create(&all[i], NULL, watcher, (void *)i));
	for (uint64_t i = 1; i <= LAST; i++) {
		CHECK(mmap((void *)number_page, PAGE, PROT_READ, MAP_SHARED | MAP_FIXED, file, i * PAGE) == number_page);
		__atomic_store_n(&expected, i, __ATOMIC_RELEASE);
		if ((i + round) % FORKS)
			continue;
		pid_t child = fork();
		CHECK(child >= 0);
		if (!child) {
			uint64_t before[THREADS];
			for (int j = 0; j < THREADS; j++)
				before[j] = counts[j * (PAGE / 8)];
			usleep(500);
			for (int j = 0; j < THREADS; j++)
				CHECK(counts[j * (PAGE / 8)] == before[j]);
			CHECK(*number_page == i);
			_exit(4);
		}
		reap(child, 4);
	}
	__atomic_store_n(&stop, 1, __ATOMIC_RELEASE);
	uint64_t sum = 0;
	for (int i = 0; i < THREADS; i++) {
		CHECK(!pthread_join(all[i], NULL));
		sum += counts[i * (PAGE / 8)];
	}
	CHECK((uint64_t)counter == sum);
	CHECK(!munmap((void *)number_page, PAGE) && !munmap((void *)counts, THREADS * PAGE) && !close(file));
}

static volatile uint64_t stored[2][PAGE / 8] __attribute__((aligned(PAGE)));

static void *storer(void *unused)
{
	for (uint64_t number = 1; !__atomic_load_n(&stop, __ATOMIC_ACQUIRE); number++) {
		stored[0][0] = number;
		stored[1][0] = number;
	}
	return unused;
}

// A child has the memory of one moment: of what another thread of its parent stores, nothing later
// without what is earlier.
static void snapshots(uint64_t round)
{
	pthread_t thread;
	stop = 0;
	stored[0][0] = stored[1][0] = 0;
	CHECK(!pthread_create(&thread, NULL, storer, NULL));
	for (uint64_t i = 0; i < 50 + round % 8; i++) {
		pid_t child = fork();
		CHECK(child >= 0);
		if (!child)
			_exit(stored[1][0] <= stored[0][0] ? 9 : 1);
		reap(child, 9);
	}
	__atomic_store_n(&stop, 1, __ATOMIC_RELEASE);
	CHECK(!pthread_join(thread, NULL));
}

static const struct {
	const char *name;
	void (*round)(uint64_t);
} kinds[] = {
	{ "forks", forks }, { "execs", execs }, { "pipes", pipes }, { "mappings", mappings },
	{ "signals", signals }, { "threads", threads }, { "files", files },
	{ "shootdowns", shootdowns }, { "data", data }, { "snapshots", snapshots },
};
#define KINDS (sizeof(kinds) / sizeof(*kinds))

static int crash(const char *way)
{
	volatile int zero = 0;
	if (!strcmp(way, "null"))
		*(volatile int *)(intptr_t)zero = 1;
	else if (!strcmp(way, "divide"))
		zero = 7 / zero;
	else if (!strcmp(way, "undefined"))
		__asm__ volatile("ud2");
	else if (!strcmp(way, "breakpoint"))
		__asm__ volatile("int3");
	else if (!strcmp(way, "privileged"))
		__asm__ volatile("hlt");
	else if (!strcmp(way, "kernel"))
		*(volatile int *)0xffff800000000000 = 1;
	return 1;
}

int main(int count, char **arguments)
{
	if (count == 3 && !strcmp(arguments[1], "say"))
		return printf("%s", arguments[2]) < 0 || fflush(stdout) ? 1 : 5;
	if (count == 3 && !strcmp(arguments[1], "crash"))
		return crash(arguments[2]);
	if (count == 2 && !strcmp(arguments[1], "faults"))
		return count_faults();
	if (count != 2 || atoi(arguments[1]) <= 0) {
		fprintf(stderr, "usage: stress SECONDS | stress crash WAY | stress faults\n");
		return 2;
	}
	self = arguments[0];
	end = now() + atoi(arguments[1]);
	pid_t workers[KINDS];
	for (size_t i = 0; i < KINDS; i++) {
		CHECK((workers[i] = fork()) >= 0);
		if (workers[i])
			continue;
		kind = kinds[i].name;
		uint64_t round = 0;
		while (now() < end)
			kinds[i].round(mix(round++ + 1000 * i));
		printf("stress: %s: %llu rounds\n", kind, (unsigned long long)round);
		fflush(stdout);
		_exit(round ? 0 : 1);
	}
	int bad = 0;
	for (size_t i = 0; i < KINDS; i++) {
		int status = 0;
		if (waitpid(workers[i], &status, 0) != workers[i] || status) {
			fprintf(stderr, "stress: %s ended with status %#x\n", kinds[i].name, status);
			bad = 1;
		}
	}
	printf(bad ? "stress: something is wrong\n" : "stress: all well\n");
	return bad;
}
