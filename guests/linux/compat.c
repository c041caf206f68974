// SPDX-License-Identifier: Apache-2.0
// System calls by `int $0x80`, and what else only 32-bit programs do: segments for thread-local
// storage, also in threads and processes that take turns; signals; 64-bit code on the way. Without
// a library, so that nothing but a compiler is needed. As a position-independent program it also
// tests address space layouts, and is its own dynamic linker. As a 64-bit program it does the
// calls, those of the page of old calls (`vsyscall`), loads such segments, and executes single
// steps with EFLAGS.NT and ID; it sets the clock of the machine that executes it.
#pragma GCC visibility push(hidden)
#define NOINLINE __attribute__((noinline))

typedef unsigned int u32;

enum {
	EXIT = 1, FORK = 2, WRITE = 4, WAITPID = 7, EXECVE = 11, GETPID = 20, ALARM = 27, KILL = 37, BRK = 45, SETRLIMIT = 75,
	CLONE = 120, MPROTECT = 125, PERSONALITY = 136, SCHED_YIELD = 158, RT_SIGACTION = 174, MMAP2 = 192, SET_THREAD_AREA = 243, CLOCK_GETTIME = 265,
};
enum { SIGTRAP = 5, SIGSEGV = 11, SIGALRM = 14, SIGUSR1 = 10, SIGCHLD = 17 };

static long call(long number, long a, long b, long c, long d)
{
	long result;
	asm volatile("int $0x80" : "=a"(result) : "a"(number), "b"(a), "c"(b), "d"(c), "S"(d)
		     : "memory"
#ifdef __x86_64__
		     , "r8", "r9", "r10", "r11"
#endif
	);
	return result;
}

static void say(const char *text)
{
	static char line[80];
	long length = 0;
	// Where 32-bit addresses reach it.
	while (text[length] && length < 80) {
		line[length] = text[length];
		length++;
	}
	call(WRITE, 1, (long)line, length, 0);
}

static void end(int code)
{
	for (;;)
		call(EXIT, code, 0, 0, 0);
}

static void check(int is_right, const char *what)
{
	if (!is_right) {
		say("wrong: ");
		say(what);
		say("\n");
		end(1);
	}
}

struct description {
	u32 number, base, limit, flags;
};

static u32 areas[4] = { 0x1111, 0x2222, 0x3333, 0x4444 };

// A description of an area for thread-local storage: 32 bits, limit in pages, usable.
static struct description describe(u32 number, u32 *area)
{
	struct description wanted = { number, (u32)(long)area, 0xfffff, 0x51 };
	return wanted;
}

// Makes %gs lead to an area; the number of the descriptor.
static u32 use(u32 number, u32 *area)
{
	// One for each area, since threads use different ones; where 32-bit addresses reach it.
	static struct description all[sizeof areas / sizeof *areas];
	struct description *wanted = &all[area - areas];
	*wanted = describe(number, area);
	check(call(SET_THREAD_AREA, (long)wanted, 0, 0, 0) == 0, "set_thread_area");
	asm volatile("mov %w0, %%gs" : : "r"(wanted->number * 8 + 3));
	return wanted->number;
}

// Removes a descriptor: not present, read only. The register that had it has the null selector
// then.
static void give_up(u32 number)
{
	static struct description none;
	none = (struct description){ number, 0, 0, 0x28 };
	check(call(SET_THREAD_AREA, (long)&none, 0, 0, 0) == 0, "set_thread_area of none");
	u32 selector;
	asm volatile("mov %%gs, %0" : "=r"(selector));
	check((selector & 0xffff) == 0, "the selector of a removed descriptor");
}

// Keeps a selector in %es in turn with a process that does not have its descriptor.
static void keep_extra(u32 number)
{
	long child = call(FORK, 0, 0, 0, 0);
	if (child == 0) {
		give_up(number);
		for (;;)
			call(SCHED_YIELD, 0, 0, 0, 0);
	}
	u32 selector = number * 8 + 3;
	for (u32 round = 0; round < 2000; round++) {
		u32 found;
		long result;
		asm volatile("mov %%es, %%esi; mov %w2, %%es; int $0x80; mov %%es, %1; mov %%esi, %%es"
			     : "=a"(result), "=&r"(found) : "r"(selector), "0"(SCHED_YIELD)
			     : "memory", "esi"
#ifdef __x86_64__
			     , "r8", "r9", "r10", "r11"
#endif
		);
		check(result == 0 && (found & 0xffff) == selector, "a selector without descriptor in another process");
	}
	call(KILL, child, 9, 0, 0);
	call(WAITPID, child, 0, 0, 0);
}

static u32 local(void)
{
	u32 value;
	asm volatile("mov %%gs:0, %0" : "=r"(value));
	return value;
}

#ifdef __i386__
static u32 selectors(void)
{
	u32 ds, es, gs;
	asm volatile("mov %%ds, %0; mov %%es, %1; mov %%gs, %2" : "=r"(ds), "=r"(es), "=r"(gs));
	return (ds & 0xff) << 16 | (es & 0xff) << 8 | (gs & 0xff);
}

static volatile int signals, faults;
static volatile u32 in_handler;
static volatile char page[4096] __attribute__((aligned(4096)));

static void on_signal(int number)
{
	(void)number;
	in_handler = local();
	signals++;
}

static void on_fault(int number)
{
	(void)number;
	faults++;
	call(MPROTECT, (long)page, sizeof page, 3, 0);
}

asm("restorer: mov $173, %eax; int $0x80");
extern char restorer[];

static void handle(int number, void (*handler)(int))
{
	// Handler, flags (SA_RESTORER, SA_SIGINFO), restorer, mask.
	u32 action[5] = { (u32)handler, 0x04000004, (u32)restorer, 0, 0 };
	check(call(RT_SIGACTION, number, (long)action, 0, 8) == 0, "rt_sigaction");
}

// Computes, with others who do the same, and looks for its own area all the time.
static void compute(u32 value)
{
	for (u32 round = 0; round < 200; round++) {
		for (volatile u32 n = 0; n < 200000; n++)
			;
		for (u32 n = 0; n < 1000; n++)
			check(local() == value, "another thread's storage");
		if (round % 16 == 0)
			call(SCHED_YIELD, 0, 0, 0, 0);
	}
}

static volatile u32 done;
static char stack[16384] __attribute__((aligned(16)));
extern long clone_thread(long flags, void *stack, void *number, struct description *area);
asm("clone_thread:\n"
    "push %ebx; push %esi; push %edi\n"
    "mov 16(%esp), %ebx; mov 20(%esp), %ecx; mov 24(%esp), %edx; mov 28(%esp), %esi; xor %edi, %edi\n"
    "mov $120, %eax; int $0x80\n"
    "test %eax, %eax; jz thread\n"
    "pop %edi; pop %esi; pop %ebx; ret");

__attribute__((used)) void thread(void)
{
	compute(areas[2]);
	done = 1;
	end(0);
}

static long wait(long process)
{
	int status = -1;
	long found;
	do
		found = call(WAITPID, process, (long)&status, 0, 0);
	while (found == -4);
	check(found == process, "waitpid");
	return status;
}

// An entry of the auxiliary vector, which is behind arguments and environment; 0 if there is none.
static u32 auxiliary(u32 *top, u32 type)
{
	u32 *at = top + 1 + top[0] + 1;
	while (*at++)
		;
	for (; at[0]; at += 2)
		if (at[0] == type)
			return at[1];
	return 0;
}

#ifdef __PIE__
enum { ENOMEM = 12, LEGACY = 0x200000, LIMIT_3GB = 0x8000000, NO_RANDOM = 0x40000 };
#define CHUNK (16u << 20)
#define INFINITE 0xffffffffu
extern char _start[];

static void touch(u32 address)
{
	volatile u32 *place = (volatile u32 *)(address & ~3u);
	*place = address;
	check(*place == address, "memory");
}

// Uses the heap, and all of the address space: whatever the kernel gives is usable.
static void fill_address_space(void)
{
	u32 heap = call(BRK, 0, 0, 0, 0);
	check((u32)call(BRK, heap + (8 << 20), 0, 0, 0) == heap + (8 << 20), "brk");
	for (u32 at = 0; at < 8 << 20; at += 1 << 20)
		touch(heap + at);
	u32 chunks = 0;
	for (;; chunks++) {
		// PROT_READ | PROT_WRITE; MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE.
		u32 at = call(MMAP2, 0, CHUNK, 3, 0x4022);
		if (at > -4096u) {
			check(at == -(u32)ENOMEM, "the end of the address space");
			break;
		}
		touch(at);
		touch(at + CHUNK - 1);
	}
	// 1 GiB of 3 or 4 GiB may be reserved, and the old layout uses its upper part only.
	check(chunks >= 56, "size of the address space");
}

// Executes itself with another layout.
static void lay_out(char *path, u32 flags, u32 stack)
{
	long child = call(FORK, 0, 0, 0, 0);
	if (child == 0) {
		u32 limit[2] = { stack, INFINITE };
		char *arguments[] = { path, "layout", 0 }, *none[] = { 0 };
		check(call(SETRLIMIT, 3, (long)limit, 0, 0) == 0, "setrlimit");
		check(call(PERSONALITY, flags, 0, 0, 0) >= 0, "personality");
		call(EXECVE, (long)path, (long)arguments, (long)none, 0);
		end(1);
	}
	check(wait(child) == 0, "a layout");
}

// The layouts that personality and stack limit choose; the second limit ends in the hole that the
// kernel's image may be in.
static void layouts(u32 *top)
{
	if (top[0] > 1) {
		fill_address_space();
		end(0);
	}
	char *path = (char *)top[1];
	lay_out(path, 0, 8 << 20);
	lay_out(path, 0, 0x80000000);
	lay_out(path, 0, INFINITE);
	lay_out(path, NO_RANDOM, 8 << 20);
	lay_out(path, LEGACY, 8 << 20);
	lay_out(path, LIMIT_3GB, 8 << 20);
	lay_out(path, LIMIT_3GB | LEGACY | NO_RANDOM, 8 << 20);
	say("layouts: all well\n");
}

// As the dynamic linker of a program, continues at its entry.
static void link(u32 *top)
{
	u32 entry = auxiliary(top, 9);
	if (entry != (u32)_start)
		asm volatile("mov %0, %%esp; jmp *%1" : : "r"(top), "r"(entry));
}
#endif

static void run(u32 *top)
{
	u32 vsyscall = auxiliary(top, 32);
	check(vsyscall != 0, "AT_SYSINFO");
	long own = call(GETPID, 0, 0, 0, 0), found;
	asm volatile("call *%1" : "=a"(found) : "r"(vsyscall), "0"(GETPID) : "memory");
	check(found == own, "__kernel_vsyscall");
	u32 time[2] = { 0, 0 };
	check(call(CLOCK_GETTIME, 1, (long)time, 0, 0) == 0 && time[0] | time[1], "clock_gettime");

	u32 number = use(-1, &areas[0]);
	check(number == 12 && local() == areas[0], "thread-local storage");
	check(selectors() == 0x2b2b63, "selectors");
	call(SCHED_YIELD, 0, 0, 0, 0);
	check(selectors() == 0x2b2b63 && local() == areas[0], "selectors later");

	handle(SIGUSR1, on_signal);
	handle(SIGALRM, on_signal);
	handle(SIGSEGV, on_fault);
	call(KILL, own, SIGUSR1, 0, 0);
	check(signals == 1 && in_handler == areas[0], "a signal");
	call(MPROTECT, (long)page, sizeof page, 0, 0);
	page[7] = 1;
	check(faults == 1 && page[7] == 1, "a fault");

	// `mov $39, %eax; syscall; lretl`: getpid in 64-bit code.
	static const unsigned char long_code[] = { 0xb8, 39, 0, 0, 0, 0x0f, 0x05, 0xcb };
	long code = call(MMAP2, 0, 4096, 7, 0x22);
	check((unsigned long)code < -4096ul, "mmap");
	for (u32 n = 0; n < sizeof long_code; n++)
		((char *)code)[n] = long_code[n];
	struct __attribute__((packed)) { u32 to; unsigned short selector; } far = { code, 0x33 };
	asm volatile("lcall *%1" : "=a"(found) : "m"(far) : "ecx", "memory", "cc");
	check(found == own && local() == areas[0], "64-bit code");

	// A selector that is none is a fault.
	long child = call(FORK, 0, 0, 0, 0);
	if (child == 0) {
		handle(SIGSEGV, 0);
		asm volatile("mov %w0, %%gs" : : "r"(0x7f));
		end(0);
	}
	check(wait(child) == SIGSEGV, "a bad selector");

	// Two processes and a thread, each with its own area, on one processor.
	child = call(FORK, 0, 0, 0, 0);
	if (child == 0) {
		check(local() == areas[0], "storage of a child");
		use(number, &areas[1]);
		compute(areas[1]);
		end(7);
	}
	struct description area = describe(number, &areas[2]);
	// CLONE_VM, FS, FILES, SIGHAND, THREAD, SYSVSEM, SETTLS
	long made = clone_thread(0x000d0f00, stack + sizeof stack, 0, &area);
	check(made > 0, "clone");
	call(ALARM, 1, 0, 0, 0);
	compute(areas[0]);
	while (!done || signals < 2)
		call(SCHED_YIELD, 0, 0, 0, 0);
	check(in_handler == areas[0] || in_handler == areas[2], "a signal of a timer");
	check(wait(child) == 7 << 8, "a child");
	check(local() == areas[0] && selectors() == 0x2b2b63, "storage in the end");
	keep_extra(number);
	give_up(number);
	say("32-bit code: all well\n");
	end(0);
}
#else
// A call of the page of old calls: `index` KiB behind its beginning.
static long old_call(long index, void *a, void *b)
{
	long (*function)(void *, void *) = (void *)(0xffffffffff600000 + 0x400 * index);
	return function(a, b);
}

static void old_calls(void)
{
	// Long ago, so that it is the guest's kernel that knows it.
	struct { long seconds, microseconds; } now = { 1000000000, 0 };
	long set, also, past;
	u32 cpu = -1, node = -1;
	asm volatile("syscall" : "=a"(set) : "a"(164), "D"(&now), "S"(0) : "rcx", "r11", "memory");
	check(set == 0, "settimeofday");
	now.seconds = 0;
	check(old_call(0, &now, 0) == 0, "gettimeofday of the old page");
	check(now.seconds - 1000000000 < 60 && now.seconds >= 1000000000 && now.microseconds < 1000000, "its time");
	past = old_call(1, &also, 0);
	check(past == also && past - now.seconds < 60 && past >= now.seconds, "time of the old page");
	check(old_call(2, &cpu, &node) == 0 && cpu < 64 && node == 0, "getcpu of the old page");
	say("old calls: all well\n");
}

static char stack[16384] __attribute__((aligned(16)));
static volatile u32 done;
extern long clone_thread(long flags, void *top);
asm("clone_thread: mov $56, %eax; syscall; test %rax, %rax; jz thread; ret");

static long native(long number, long a, long b, long c, long d)
{
	register long r10 asm("r10") = d;
	long result;
	asm volatile("syscall" : "=a"(result) : "0"(number), "D"(a), "S"(b), "d"(c), "r"(r10)
		     : "rcx", "r11", "memory");
	return result;
}

// A thread starts with this function.
static void (*volatile body)(void);

__attribute__((used)) void thread(void)
{
	body();
	done = 1;
	end(0);
}

static void start(void (*function)(void))
{
	done = 0;
	body = function;
	// CLONE_VM, FS, FILES, SIGHAND, THREAD, SYSVSEM
	check(clone_thread(0x00050f00, stack + sizeof stack) > 0, "clone");
}

static void join(void)
{
	while (!done)
		native(24, 0, 0, 0, 0);
}

// Keeps a selector of all 64-bit code in turn with another thread.
static void keep(u32 selector)
{
	for (u32 round = 0; round < 2000; round++) {
		u32 found;
		asm volatile("mov %w0, %%gs" : : "r"(selector));
		check(native(24, 0, 0, 0, 0) == 0, "sched_yield");
		asm volatile("mov %%gs, %0" : "=r"(found));
		check((found & 0xffff) == selector, "a selector of 64-bit code");
	}
}

static void keep_flat(void)
{
	keep(0x2b);
}

// Loads its own segment in turn with another thread. From a few calls on, the kernel is entered
// and left by the fastest way that a back end has.
static void take_turns(u32 number, u32 value)
{
	for (u32 round = 0; round < 2000; round++) {
		asm volatile("mov %w0, %%gs" : : "r"(number * 8 + 3));
		check(local() == value, "another thread's segment in 64-bit code");
		check(native(24, 0, 0, 0, 0) == 0 && local() == value, "a segment after a call");
		if (round % 2) {
			// The other thread's descriptor is not loaded later, either.
			asm volatile("mov %w0, %%gs" : : "r"(0));
			native(24, 0, 0, 0, 0);
		}
	}
}

static void use_second(void)
{
	take_turns(use(12, &areas[1]), areas[1]);
}

static volatile u32 steps;
extern char restorer[];
asm("restorer: mov $15, %eax; syscall");

static void on_step(int number)
{
	(void)number;
	steps++;
}

// Single steps with NT and ID, over a system call, which is rewritten after its first executions.
static void nested(void)
{
	// Handler, SA_RESTORER, restorer, mask.
	long action[4] = { (long)on_step, 0x04000000, (long)restorer, 0 }, flags, own;
	check(native(13, SIGTRAP, (long)action, 0, 8) == 0, "rt_sigaction");
	for (u32 round = 0; round < 100; round++) {
		steps = 0;
		asm volatile("pushfq; orl $0x204100, (%%rsp); popfq; syscall; nop\n"
			     "pushfq; pop %0; andl $~0x204100, -8(%%rsp); sub $8, %%rsp; popfq"
			     : "=&r"(flags), "=a"(own) : "1"(39) : "rcx", "r11", "memory", "cc");
		check(own == native(39, 0, 0, 0, 0) && steps >= 3, "single steps");
		check(flags & 0x4000, "NT");
		check(flags & 0x200000, "ID");
		asm volatile("pushfq; pop %0" : "=r"(flags) : : "memory");
		check(!(flags & 0x204100), "flags without NT and ID");
	}
	say("single steps with NT: all well\n");
}

// Bases of the upper half are as good as others to those who do not use them.
static void keep_bases(void)
{
	static const long bases[] = { 0, 0x123, 0x7fffffffffff, (long)(-1ul << 47), -1 };
	for (u32 round = 0; round < 500; round++) {
		long base = bases[round % 5], fs, gs;
		u32 selector = 0;
		asm volatile("mov %w2, %%gs; wrgsbase %3; wrfsbase %3; syscall; rdgsbase %0; rdfsbase %1; mov %%gs, %w2"
			     : "=&r"(gs), "=&r"(fs), "+r"(selector) : "r"(base), "a"(24) : "rcx", "r11", "memory");
		check(gs == base && fs == base && (selector & 0xffff) == 0, "the base of a segment");
		selector = 0x2b;
		asm volatile("mov %w1, %%gs; wrgsbase %2; syscall; rdgsbase %0; mov %%gs, %w1"
			     : "=&r"(gs), "+r"(selector) : "r"(base), "a"(24) : "rcx", "r11", "memory");
		check(gs == base && (selector & 0xffff) == 0x2b, "the base of a segment with selector");
	}
	asm volatile("mov %w0, %%gs; wrfsbase %1" : : "r"(0), "r"(0l));
}

static void segments(void)
{
	start(keep_bases);
	keep_bases();
	join();
	start(keep_flat);
	keep(0);
	join();
	u32 number = use(-1, &areas[0]);
	check(number == 12 && local() == areas[0], "a segment of 64-bit code");
	use(number, &areas[2]);
	check(local() == areas[2], "a segment that has changed");
	use(number, &areas[0]);
	start(use_second);
	take_turns(number, areas[0]);
	join();
	asm volatile("mov %w0, %%gs" : : "r"(number * 8 + 3));
	long child = call(FORK, 0, 0, 0, 0);
	if (child == 0) {
		check(local() == areas[0], "a segment of a child");
		asm volatile("mov %w0, %%gs" : : "r"(0x7f));
		end(0);
	}
	static int status;
	check(call(WAITPID, child, (long)&status, 0, 0) == child, "waitpid");
	check((status & 0x7f) == SIGSEGV, "a bad selector");
	keep_extra(number);
	give_up(number);
	static long base = 1;
	// arch_prctl(ARCH_GET_GS)
	check(native(158, 0x1004, (long)&base, 0, 0) == 0 && base == 0, "the base of a removed descriptor");
	say("segments of 64-bit code: all well\n");
}

static void run(void)
{
	long own, found = call(GETPID, 0, 0, 0, 0);
	asm volatile("syscall" : "=a"(own) : "a"(39) : "rcx", "r11", "memory");
	check(found == own, "getpid");
	check(call(0x7fff, 0, 0, 0, 0) == -38, "a call that is none");
	say("int 0x80 of 64-bit code: all well\n");
	segments();
	nested();
	old_calls();
	end(0);
}
#endif

#ifdef __i386__
asm(".globl _start; _start: mov %esp, %eax; and $-16, %esp; sub $12, %esp; push %eax; call begin");
__attribute__((used)) void begin(u32 *top)
{
#ifdef __PIE__
	link(top);
	layouts(top);
#endif
	run(top);
}
#else
asm(".globl _start; _start: and $-16, %rsp; call begin");
__attribute__((used)) void begin(void)
{
	run();
}
#endif
