/* vbench - small static micro-benchmark set for comparing hypervisors.
 *
 * Every result line is:
 *     VB <name> <value> <unit> [n=<iterations>] [mark=<index>] [events=<count>,...]
 * The index is that of the pair of marks (mark.h) around the measurement; the events are those of
 * Parador's vTLB between them, all counters that the vCPU has (CPUID leaf 0x40000100).
 * Times come from CLOCK_MONOTONIC.  Under QEMU "-icount shift=0" one virtual
 * nanosecond is one executed guest instruction (outer machine), so a value
 * printed as ns IS an instruction count of everything the outer CPU executed
 * (guest + hypervisor + VMM) between the two clock reads.
 *
 *   vbench [-s scale%] [-x] [test ...]
 *     -s 50    run 50 % of the default iteration counts
 *     -x       also run tests that need a hypervisor underneath (vmmcall)
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef __x86_64__
#include <sys/io.h>
#endif
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "mark.h"

static int scale = 100, xtests;
static char **only; static int nonly;

static inline uint64_t now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000ull + t.tv_nsec;
}
/* events of the vTLB so far */
#define EVENTS 16
static int read_events(uint64_t *events)
{
	int n = 0;
#ifdef __x86_64__
	for (; n < EVENTS; n++) {
		uint32_t a = 0x40000100, b, c = n, d;
		__asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
		if (d != 0x424c5476) break;	/* "vTLB" */
		events[n] = (uint64_t)b << 32 | a;
	}
#endif
	return n;
}
/* a measurement begins or ends */
static int pair = -1, nevents;
static uint64_t events[EVENTS];
static uint64_t begin(void)
{
	pair++;
	read_events(events);
	MARK(START);
	return now();
}
static uint64_t end(uint64_t since)
{
	uint64_t t = now() - since, after[EVENTS];
	MARK(END);
	nevents = read_events(after);
	for (int i = 0; i < nevents; i++) events[i] = after[i] - events[i];
	return t;
}
#ifdef __x86_64__
static inline uint64_t rdtsc(void)
{
	uint32_t a, d;
	__asm__ volatile("lfence; rdtsc" : "=a"(a), "=d"(d) :: "memory");
	return (uint64_t)d << 32 | a;
}
#else
static inline uint64_t rdtsc(void)
{
	uint64_t t;
	__asm__ volatile("isb; mrs %0, cntvct_el0" : "=r"(t) :: "memory");
	return t;
}
#endif
static int N(int n) { int r = (int)((long)n * scale / 100); return r < 1 ? 1 : r; }
static int want(const char *s)
{
	if (!nonly) return 1;
	for (int i = 0; i < nonly; i++) if (!strcmp(only[i], s)) return 1;
	return 0;
}
static void out(const char *name, double ns, int n)
{
	printf("VB %-16s %12.1f ns n=%d", name, ns, n);
	if (pair >= 0) printf(" mark=%d", pair);
	for (int i = 0; i < nevents; i++) printf(i ? ",%llu" : " events=%llu", (unsigned long long)events[i]);
	putchar('\n');
	fflush(stdout);
}
static void die(const char *s) { perror(s); exit(1); }
static void xread(int fd, void *p, int n) { if (read(fd, p, n) != n) _exit(3); }
static void xwrite(int fd, const void *p, int n) { if (write(fd, p, n) != n) _exit(4); }

/* ---- plain cpu ---------------------------------------------------------- */
static void t_compute(void)
{
	int n = N(10000000);
	unsigned long s = 1;
	uint64_t t = now();
	for (int i = 0; i < n; i++) {
		s = s * 6364136223846793005ul + i;
		__asm__ volatile("" : "+r"(s));
	}
	out("compute", (double)(now() - t) / n, n);
}
static void t_clock(void)
{
	int n = N(20000);
	uint64_t t = now();
	for (int i = 0; i < n; i++) (void)now();
	out("clock_gettime", (double)(now() - t) / n, n);
}
static void t_syscall(void)
{
	int n = N(100000);
	uint64_t t = now();
	for (int i = 0; i < n; i++) syscall(SYS_getppid);
	out("nullsys", (double)(now() - t) / n, n);
}

/* time since the kernel started to keep it: as the first program, the cost of booting */
static void t_boot(void)
{
	struct timespec t;
	if (!nonly) return;
	clock_gettime(CLOCK_BOOTTIME, &t);
	out("boot", t.tv_sec * 1e9 + t.tv_nsec, 1);
}

/* ---- processes ---------------------------------------------------------- */
static void t_forkwait(void)
{
	int n = N(500);
	for (int k = -5; k < n; k++) {
		static uint64_t t;
		if (k == 0) t = begin();
		pid_t p = fork();
		if (p < 0) die("fork");
		if (!p) _exit(0);
		if (waitpid(p, 0, 0) != p) die("waitpid");
		if (k == n - 1) out("forkwait", (double)end(t) / n, n);
	}
}

static void t_forkexec(void)
{
	int n = N(100);
	uint64_t t = 0;
	for (int k = -3; k < n; k++) {
		if (k == 0) t = begin();
		pid_t p = fork();
		if (p < 0) die("fork");
		if (!p) { execl("/proc/self/exe", "vbench", "-e", (char *)0); _exit(9); }
		int st; waitpid(p, &st, 0);
		if (st) { printf("VB forkexec failed %x\n", st); return; }
	}
	out("forkexec", (double)end(t) / n, n);
}

/* ---- memory ------------------------------------------------------------- */
static void touch(const char *name, int fd, int flags, int n)
{
	const int PG = 1024;
	uint64_t t = 0;
	for (int i = -2; i < n; i++) {
		if (i == 0) t = begin();
		char *p = mmap(0, PG * 4096, PROT_READ | PROT_WRITE, flags, fd, 0);
		if (p == MAP_FAILED) die("mmap");
		madvise(p, PG * 4096, MADV_NOHUGEPAGE);
		for (int j = 0; j < PG; j++) p[j * 4096] = 1;
		munmap(p, PG * 4096);
	}
	out(name, (double)end(t) / n / PG, n * PG);
}
static void t_touch(void)
{
	/* per page: map 4 MB, write one byte in each of 1024 pages, unmap */
	touch("touch_anon", -1, MAP_PRIVATE | MAP_ANONYMOUS, N(40));
	int fd = memfd_create("touch", 0);
	if (fd < 0 || ftruncate(fd, 4 << 20)) { perror("memfd"); return; }
	touch("touch_file", fd, MAP_SHARED, N(40));
	close(fd);
}
/* first touch ever of 96 MB: only meaningful as the first test after boot; shows
 * lazily populated nested/host page tables (guest THP off, 4 KB faults) */
static void t_cold(void)
{
	size_t mb = 96, n = mb << 8;
	char *p = mmap(0, mb << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (p == MAP_FAILED) die("mmap");
	madvise(p, mb << 20, MADV_NOHUGEPAGE);
	for (int k = 0; k < 2; k++) {
		uint64_t t = now();
		for (size_t j = 0; j < n; j++) p[j << 12] = 1;
		out(k ? "coldtouch_2nd" : "coldtouch_1st", (double)(now() - t) / n, (int)n);
		if (!k) madvise(p, mb << 20, MADV_DONTNEED);   /* 2nd: guest faults only */
	}
	munmap(p, mb << 20);
}
static void t_thp(void)
{
	int n = N(40);
	size_t sz = 2 << 20;
	char *b = mmap(0, 2 * sz, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (b == MAP_FAILED) die("mmap");
	char *p = (char *)(((uintptr_t)b + sz - 1) & ~(sz - 1));
	madvise(p, sz, MADV_HUGEPAGE);
	uint64_t t = 0;
	for (int i = -2; i < n; i++) {
		if (i == 0) t = now();
		for (size_t j = 0; j < sz; j += 4096) p[j] = 1;
		madvise(p, sz, MADV_DONTNEED);
	}
	out("touch_2M_thp", (double)(now() - t) / n, n);
	munmap(b, 2 * sz);
}
static void t_mprot(void)
{
	int n = N(2000);
	char *p = mmap(0, 65536, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	memset(p, 1, 65536);
	uint64_t t = begin();
	for (int i = 0; i < n; i++) {
		mprotect(p, 4096, PROT_READ);
		mprotect(p, 4096, PROT_READ | PROT_WRITE);
		p[0] = i;
	}
	out("mprotect_pair", (double)end(t) / n, n);
	munmap(p, 65536);
}

/* 1024 reads of 1024/fraction pages of a mapped file of 4 MB, with mmap and munmap; per read */
static void sweep(int fd, int fraction, int lock)
{
	const int PG = 1024;
	int n = N(40);
	uint64_t t = 0;
	for (int i = -2; i < n; i++) {
		if (i == 0) t = begin();
		volatile char *p = mmap(0, PG * 4096, PROT_READ, MAP_PRIVATE, fd, 0);
		if (p == MAP_FAILED) die("mmap");
		if (lock && mlock((void *)p, PG / fraction * 4096)) die("mlock");
		for (int j = 0; j < PG; j++) (void)p[j % (PG / fraction) * 4096];
		munmap((void *)p, PG * 4096);
	}
	char nm[40];
	snprintf(nm, sizeof nm, "touchmem%s_%d", lock ? "_lock" : "", fraction);
	out(nm, (double)end(t) / n / PG, n * PG);
}
static void t_sweep(void)
{
	int fd = memfd_create("sweep", 0);
	if (fd < 0 || ftruncate(fd, 4 << 20)) { perror("memfd"); return; }
	char *p = mmap(0, 4 << 20, PROT_WRITE, MAP_SHARED, fd, 0);
	if (p == MAP_FAILED) die("mmap");
	memset(p, 1, 4 << 20);                 /* all its pages exist */
	munmap(p, 4 << 20);
	for (int lock = 0; lock < 2; lock++)
		for (int fraction = 1; fraction <= 64; fraction *= 4) sweep(fd, fraction, lock);
	close(fd);
}

/* ---- IPC ---------------------------------------------------------------- */
static void pingpong(const char *name, int a0, int a1, int b0, int b1, int n)
{
	/* parent: write a1, read b0.   child: read a0, write b1 */
	char c = 0;
	const int warm = 50;
	pid_t p = fork();
	if (p < 0) die("fork");
	if (!p) {
		for (int i = 0; i < n + warm; i++) { xread(a0, &c, 1); xwrite(b1, &c, 1); }
		_exit(0);
	}
	uint64_t t = 0;
	for (int i = 0; i < n + warm; i++) {
		if (i == warm) t = begin();
		xwrite(a1, &c, 1); xread(b0, &c, 1);
	}
	out(name, (double)end(t) / n, n);
	waitpid(p, 0, 0);
}
static void t_sock(void)
{
	int s[2];
	if (socketpair(AF_UNIX, SOCK_STREAM, 0, s)) die("socketpair");
	pingpong("sockxmit_rt", s[1], s[0], s[0], s[1], N(5000));
	close(s[0]); close(s[1]);
}
static void t_pipe(void)
{
	int a[2], b[2];
	if (pipe(a) || pipe(b)) die("pipe");
	pingpong("pipe_rt", a[0], a[1], b[0], b[1], N(5000));
	close(a[0]); close(a[1]); close(b[0]); close(b[1]);
}

/* ---- lat_ctx ------------------------------------------------------------ */
static volatile int sink;
enum { MAX_PROCS = 96 };
static void sumit(int *p, int kb)
{
	int s = 0;
	for (int i = 0; i < kb * 256; i++) s += p[i];
	sink = s;
}
/* the same work by one process, without what interrupts it now and then */
static double ctx_overhead(int kb)
{
	enum { BATCHES = 5, LOOPS = 20 };
	int p[2]; char c = 0;
	int *m = kb ? calloc(kb, 1024) : 0;
	if (m) memset(m, 1, kb * 1024);
	if (pipe(p)) die("pipe");
	uint64_t best = UINT64_MAX;
	for (int k = 0; k < BATCHES; k++) {
		uint64_t t = now();
		for (int i = 0; i < LOOPS; i++) { xwrite(p[1], &c, 1); xread(p[0], &c, 1); sumit(m, kb); }
		t = now() - t;
		if (t < best) best = t;
	}
	close(p[0]); close(p[1]); free(m);
	return (double)best / LOOPS;
}
/* a ring of np processes that pass a byte on and sum kb KB */
static void ring(int np, int kb)
{
	int pp[MAX_PROCS][2];
	int loops = N(4000 / np), warm = 3;
	pid_t kid[MAX_PROCS];
	for (int i = 0; i < np; i++) if (pipe(pp[i])) die("pipe");
	for (int i = 1; i < np; i++) {
		kid[i] = fork();
		if (kid[i] < 0) die("fork");
		if (!kid[i]) {
			char c;
			int *m = kb ? malloc(kb * 1024) : 0;
			if (m) memset(m, 1, kb * 1024);
			/* once more, when all is measured: ends cost nothing */
			for (int k = 0; k <= loops + warm; k++) {
				xread(pp[i][0], &c, 1);
				sumit(m, kb);
				xwrite(pp[(i + 1) % np][1], &c, 1);
			}
			_exit(0);
		}
	}
	char c = 0;
	int *m = kb ? malloc(kb * 1024) : 0;
	if (m) memset(m, 1, kb * 1024);
	uint64_t t = 0;
	for (int k = 0; k < loops + warm; k++) {
		if (k == warm) t = begin();
		xwrite(pp[1 % np][1], &c, 1);
		xread(pp[0][0], &c, 1);
		sumit(m, kb);
	}
	double raw = (double)end(t) / loops / np;
	xwrite(pp[1 % np][1], &c, 1);
	for (int i = 1; i < np; i++) waitpid(kid[i], 0, 0);
	for (int i = 0; i < np; i++) { close(pp[i][0]); close(pp[i][1]); }
	free(m);
	double ov = ctx_overhead(kb);
	char nm[40];
	snprintf(nm, sizeof nm, "ctx_%dp_%dk_raw", np, kb);
	out(nm, raw, loops * np);
	snprintf(nm, sizeof nm, "ctx_%dp_%dk", np, kb);
	out(nm, raw - ov, loops * np);
}
static void t_ctx(void)
{
	static const int procs[] = { 2, 8, 16 }, sizes[] = { 0, 16, 64 };
	for (unsigned a = 0; a < 3; a++) for (unsigned b = 0; b < 3; b++) ring(procs[a], sizes[b]);
}
/* the same for more processes */
static void t_lat_ctx(void)
{
	static const int procs[] = { 2, 4, 8, 16, 32, 64, 96 }, sizes[] = { 0, 4, 16, 64 };
	for (unsigned a = 0; a < sizeof procs / sizeof *procs; a++)
		for (unsigned b = 0; b < sizeof sizes / sizeof *sizes; b++) ring(procs[a], sizes[b]);
}

/* ---- jobs ---------------------------------------------------------------- */
/* np processes at once; each touches its pages and yields, again and again; per turn */
static void jobs(int np)
{
	const int PG = 32;
	int n = N(500), go[2];
	char c;
	char *p = mmap(0, PG * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (p == MAP_FAILED || pipe(go)) die("jobs");
	for (int i = 0; i < np; i++) {
		pid_t kid = fork();
		if (kid < 0) die("fork");
		if (!kid) {
			close(go[1]);
			memset(p, 1, PG * 4096);
			if (read(go[0], &c, 1)) _exit(3);      /* all are there */
			for (int k = 0; k < n; k++) {
				for (int j = 0; j < PG; j++) p[j * 4096] = k;
				sched_yield();
			}
			_exit(0);
		}
	}
	close(go[0]);
	struct timespec settle = { 0, 100000000 };
	nanosleep(&settle, 0);                         /* all wait */
	uint64_t t = begin();
	close(go[1]);
	while (wait(0) > 0) ;
	char nm[40];
	snprintf(nm, sizeof nm, "jobs_%d", np);
	out(nm, (double)end(t) / n / np, n * np);
	munmap(p, PG * 4096);
}
static void t_jobs(void)
{
	static const int procs[] = { 1, 2, 4, 6, 8, 12, 16, 24, 32 };
	for (unsigned a = 0; a < sizeof procs / sizeof *procs; a++) jobs(procs[a]);
}
/* one C file by gcc, after a first time */
static void t_compile(void)
{
	for (int k = 0; k < 2; k++) {
		uint64_t t = begin();
		pid_t p = fork();
		if (p < 0) die("fork");
		if (!p) {
			execl("/bin/gcc", "gcc", "-B/bin/", "-O1", "-c", "/lua/compiled.c", "-o", "/tmp/o.o", (char *)0);
			_exit(9);
		}
		int st; waitpid(p, &st, 0);
		t = end(t);
		if (st) { printf("VB compile failed %x\n", st); return; }
		out(k ? "compile" : "compile_1st", t, 1);
	}
}

/* ---- exits -------------------------------------------------------------- */
static sigjmp_buf jb;
static void onsig(int s) { siglongjmp(jb, s); }
static void guarded(const char *name, void (*f)(int), int n)
{
	int s;
	signal(SIGILL, onsig); signal(SIGSEGV, onsig); signal(SIGBUS, onsig);
	if (!(s = sigsetjmp(jb, 1))) {
		f(N(10));                       /* warm */
		uint64_t t = now();
		f(n);
		t = now() - t;
		out(name, (double)t / n, n);
	} else
		printf("VB %-16s unavailable (signal %d)\n", name, s);
	signal(SIGILL, SIG_DFL); signal(SIGSEGV, SIG_DFL); signal(SIGBUS, SIG_DFL);
}
static void f_counter(int n) { while (n--) rdtsc(); }
#ifdef __x86_64__
static void f_cpuid(int n)
{
	while (n--) { uint32_t a = 0, b, c = 0, d;
		__asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d) :: "memory"); }
}
static char repbuf[4096];
static void f_rep(int n)
{
	while (n--) { void *d = repbuf; unsigned long c = 512;
		__asm__ volatile("rep stosq" : "+D"(d), "+c"(c) : "a"(0ul) : "memory"); }
}
static void f_vmmcall(int n)
{
	/* unknown hypercall number; from CPL3 KVM answers -EPERM, after a full exit */
	while (n--) { uint64_t a = 0x7fff; __asm__ volatile("vmmcall" : "+a"(a) :: "memory", "rbx", "rcx", "rdx"); }
}
static void f_out80(int n) { while (n--) outb(0, 0x80); }
static void f_inpit(int n) { while (n--) inb(0x61); }
static void t_exits(void)
{
	guarded("rep_stosq_4k", f_rep, N(2000));     /* how the emulator counts rep */
	guarded("x_empty_rdtsc", f_counter, N(20000));
	guarded("x_cpuid", f_cpuid, N(20000));
	if (xtests) guarded("x_vmmcall", f_vmmcall, N(20000));
	if (!iopl(3)) {
		guarded("x_out80", f_out80, N(5000));
		guarded("x_in61", f_inpit, N(5000));
	} else
		printf("VB x_out80 unavailable (iopl: %s)\n", strerror(errno));
}
#else
static void t_exits(void)
{
	guarded("x_counter", f_counter, N(20000));
}
#endif

/* ---- idle / timer -------------------------------------------------------- */
static void t_timer(void)
{
	int n = N(100);
	struct timespec d = { 0, 100000 };
	nanosleep(&d, 0);
	uint64_t t = now();
	for (int i = 0; i < n; i++) nanosleep(&d, 0);
	out("sleep100us_over", (double)(now() - t) / n - 100000, n);
}

int main(int argc, char **argv)
{
	int o;
	while ((o = getopt(argc, argv, "s:xe")) > 0) {
		if (o == 's') scale = atoi(optarg);
		else if (o == 'x') xtests = 1;
		else if (o == 'e') return 0;
		else return 1;
	}
	only = argv + optind; nonly = argc - optind;
	uint64_t a = now(), ta = rdtsc();
	static const struct { const char *n; void (*f)(void); int named; } T[] = {
		{ "boot", t_boot }, { "cold", t_cold }, { "compute", t_compute }, { "clock", t_clock }, { "nullsys", t_syscall },
		{ "forkwait", t_forkwait }, { "forkexec", t_forkexec },
		{ "touchmem", t_touch }, { "thp", t_thp }, { "mprot", t_mprot },
		{ "sockxmit", t_sock }, { "pipe", t_pipe }, { "ctx", t_ctx },
		{ "exits", t_exits }, { "timer", t_timer },
		/* only if they are named */
		{ "sweep", t_sweep, 1 }, { "lat_ctx", t_lat_ctx, 1 }, { "jobs", t_jobs, 1 }, { "compile", t_compile, 1 },
	};
	for (unsigned i = 0; i < sizeof T / sizeof *T; i++)
		if ((nonly || !T[i].named) && want(T[i].n)) T[i].f();
	uint64_t b = now(), tb = rdtsc();
	printf("VB total_ns %llu tsc %llu ratio %.6f\n", (unsigned long long)(b - a),
	       (unsigned long long)(tb - ta), (double)(tb - ta) / (b - a));
	printf("VB done\n");
	return 0;
}
