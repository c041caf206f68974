// SPDX-License-Identifier: Apache-2.0
// User programs at the border between guest user mode and the guest kernel, where both run in
// processes of a host (`parador run`).
//
// `isolation MODE [TEST...]` runs the named tests, or all of them; MODE is the argument of
// `--protection`. With `STEPS` defined, pages of the program's own code are such that they are
// executed one instruction at a time with protection keys. Each test is a process of its own with a
// time limit, and fails if the kernel or the processor does anything but what it does on a machine
// of its own.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

#define PAGE 4096
// Address of the kernel's image (`proto::hosted::layout::IMAGE`).
#define KERNEL 0x40000000ul
// Seconds that a test may take on a busy or emulated host.
#define TIME 120
// Calls from one place that make a back end rewrite it.
#define HOT 16
// Offset of a sector in the boot block of a file system, in bytes.
#define BOOT_BLOCK 512
// EFLAGS.
#define TF 0x100l
#define AC 0x40000l
// PKRU of user mode with `--protection keys` (`wedge_x86::PROGRAM_RIGHTS`).
#define USER_PKRU 0xffffffec

// The failed condition, and the end.
#define CHECK(condition) \
	do { \
		if (!(condition)) { \
			printf("isolation: line %d: %s (errno %d)\n", __LINE__, #condition, errno); \
			fflush(stdout); \
			_exit(1); \
		} \
	} while (0)

// Makes the page of code that it is in one with an XRSTOR inside of other instructions.
#ifdef STEPS
#define STEPPED asm volatile("jmp 1f\n .byte 0x0f, 0xae, 0x2f\n 1:")
#else
#define STEPPED
#endif

typedef long function(void);

static const char *mode;

// None of it is to be in this program's own code: compilers put constants there.
static const volatile uint8_t get_pid[] = { 0xb8, SYS_getpid, 0, 0, 0, 0x0f, 0x05, 0xc3 };
static const volatile uint8_t seven[] = { 0xb8, 7, 0, 0, 0, 0x90, 0x90, 0xc3 };

static void put(volatile uint8_t *to, const volatile uint8_t *bytes, size_t length)
{
	while (length--)
		*to++ = *bytes++;
}

#define PUT(to, bytes) put(to, bytes, sizeof(bytes))

static uint8_t *pages(size_t length, int rights)
{
	void *at = mmap(NULL, length, rights, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(at != MAP_FAILED);
	return at;
}

static void heat(function *call, long result)
{
	for (int i = 0; i < HOT; i++)
		CHECK(call() == result);
}

static void handle(int number, void (*handler)(int, siginfo_t *, void *), int flags)
{
	struct sigaction action = { .sa_sigaction = handler, .sa_flags = SA_SIGINFO | flags };
	CHECK(sigaction(number, &action, NULL) == 0);
}

static int status_of(pid_t child)
{
	int status = 0;
	CHECK(waitpid(child, &status, 0) == child);
	return status;
}

static void expect_exit(pid_t child, int code)
{
	int status = status_of(child);
	CHECK(WIFEXITED(status) && WEXITSTATUS(status) == code);
}

// --- Compiled packet filters.

static struct sock_filter filter[4096];

static void attach(int socket, unsigned length)
{
	struct sock_fprog program = { length, filter };
	CHECK(setsockopt(socket, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof(program)) == 0);
}

// The kernel writes compiled code of more than a page, with constants whose bytes are WRPKRU, and
// can change its code afterwards.
static void large_filters(void)
{
	static const volatile unsigned constants[] = { 0x01020304, 0xc3ef010f, 0x0028ae0f };
	if (getuid() == 0)
		CHECK(setuid(1000) == 0);
	for (int i = 0; i < 6; i++) {
		// As many as the default of net.core.optmem_max allows.
		const int length = 2300;
		int pair[2], on = 1;
		char packet[4] = "abc";
		CHECK(socketpair(AF_UNIX, SOCK_DGRAM, 0, pair) == 0);
		for (int at = 0; at < length - 1; at++)
			filter[at] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_IMM, constants[i % 3]);
		filter[length - 1] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, 0xffff);
		attach(pair[1], length);
		CHECK(write(pair[0], packet, 3) == 3);
		CHECK(read(pair[1], packet, 3) == 3);
		// Changes of code by a static key.
		CHECK(setsockopt(pair[1], SOL_SOCKET, SO_TIMESTAMP, &on, sizeof(on)) == 0);
		close(pair[0]);
		close(pair[1]);
	}
}

// A filter compares with the constant that it was given, whatever instruction its bytes are.
static void filter_constants(void)
{
	static const volatile unsigned constants[] = { 0x01020304, 0xc3ef010f, 0xef010f00, 0x28ae0f0a, 0x0028ae0f, 0x0a28ae0f, 0xaf7fae0f };
	for (size_t i = 0; i < sizeof(constants) / sizeof(*constants); i++) {
		unsigned wanted = constants[i];
		int pair[2];
		CHECK(socketpair(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK, 0, pair) == 0);
		filter[0] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0);
		filter[1] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, wanted, 0, 1);
		filter[2] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, 0xffff);
		filter[3] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, 0);
		attach(pair[1], 4);
		for (unsigned change = 0; change < 33; change++) {
			unsigned value = __builtin_bswap32(change == 32 ? wanted : wanted ^ 1u << change);
			CHECK(write(pair[0], &value, sizeof(value)) == sizeof(value));
			long received = read(pair[1], &value, sizeof(value));
			CHECK((received == sizeof(value)) == (change == 32));
		}
		close(pair[0]);
		close(pair[1]);
	}
}

// --- Single steps, and alignment checks.

static volatile long traps, trapped_rax, trapped_rip;
static void count_trap(int number, siginfo_t *info, void *context)
{
	greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
	(void)number, (void)info;
	traps++;
	trapped_rax = registers[REG_RAX];
	trapped_rip = registers[REG_RIP];
}

static void trap_once(int number, siginfo_t *info, void *context)
{
	count_trap(number, info, context);
	((ucontext_t *)context)->uc_mcontext.gregs[REG_EFL] &= ~(TF | AC);
}

extern char stepped_call[], stepped_end[];
asm(".text\nstepped_call: syscall\n nop\nstepped_end: nop\n ret\n");

static long stepped_number, stepped_argument, stepped_flags;
static void enter_stepped(int number, siginfo_t *info, void *context)
{
	greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
	(void)number, (void)info;
	// After the call, `ret` continues in `raise`'s caller of the handler: a copy of the return
	// address.
	registers[REG_RSP] -= 8;
	*(long *)registers[REG_RSP] = registers[REG_RIP];
	registers[REG_RIP] = (long)stepped_call;
	registers[REG_RAX] = stepped_number;
	registers[REG_RDI] = stepped_argument;
	registers[REG_EFL] |= stepped_flags;
}

static void step_into_call(long number, long argument, long flags)
{
	stepped_number = number;
	stepped_argument = argument;
	stepped_flags = flags;
	traps = 0;
	handle(SIGTRAP, trap_once, 0);
	handle(SIGUSR1, enter_stepped, 0);
	asm volatile("lea -256(%%rsp), %%rsp\n syscall\n lea 256(%%rsp), %%rsp"
		     :: "a"(SYS_kill), "D"(getpid()), "S"(SIGUSR1)
		     : "rcx", "rdx", "r8", "r9", "r10", "r11", "memory", "cc");
}

// The guest kernel enters user mode with TF set at a system call: the guest kernel executes the
// call, and not the host.
static void stepped_calls(void)
{
	for (int round = 0; round < 8; round++) {
		step_into_call(SYS_getpid, 0, TF);
		CHECK(traps == 1 && trapped_rax == getpid());
		CHECK(trapped_rip > (long)stepped_call && trapped_rip <= (long)stepped_end);
		step_into_call(SYS_getppid, 0, TF | AC);
		CHECK(traps == 1 && trapped_rax == getppid());
		pid_t child = fork();
		if (child == 0) {
			step_into_call(SYS_exit_group, 42 + round, TF);
			_exit(1);
		}
		expect_exit(child, 42 + round);
	}
}

// A tracer steps a child through system calls, its end among them.
static void traced_steps(void)
{
	pid_t child = fork();
	int status, steps = 0;
	if (child == 0) {
		ptrace(PTRACE_TRACEME, 0, 0, 0);
		raise(SIGSTOP);
		for (int i = 0; i < HOT; i++)
			syscall(SYS_getppid);
		_exit(3);
	}
	CHECK(WIFSTOPPED(status_of(child)));
	for (status = 0x7f; WIFSTOPPED(status) && steps < 100000; steps++) {
		CHECK(ptrace(PTRACE_SINGLESTEP, child, 0, 0) == 0);
		status = status_of(child);
	}
	CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 3 && steps > 2 * HOT);
}

static volatile int alarms;
static void count_alarm(int number, siginfo_t *info, void *context)
{
	(void)number, (void)info, (void)context;
	alarms++;
}

// Each instruction is a step, of rewritten system calls, page faults and returns from signals, with
// alignment checks and without.
static void steps_everywhere(void)
{
	uint8_t *code = pages(PAGE, PROT_READ | PROT_WRITE | PROT_EXEC);
	PUT(code + 256, get_pid);
	mprotect(code, PAGE, PROT_READ | PROT_EXEC);
	heat((function *)(code + 256), getpid());
	STEPPED;
	handle(SIGTRAP, count_trap, 0);
	handle(SIGALRM, count_alarm, 0);
	for (int flags = 0; flags < 2; flags++) {
		uint8_t *memory = pages(8 * PAGE, PROT_READ | PROT_WRITE);
		long changed = flags ? TF | AC : TF, sum = 0, pid = getpid();
		traps = 0;
		for (long i = 0; i < 8; i++) {
			long result, now, cpuid = 0;
			// Once: on a slow host the handler takes longer than any short interval.
			struct itimerval soon = { .it_value = { 0, 300 + 400 * i } };
			setitimer(ITIMER_REAL, &soon, NULL);
			// On, a call, a page fault, an exception of no consequence, off.
			asm volatile("pushfq\n or %[flags], (%%rsp)\n popfq\n call *%[code]\n movb $1, (%[at])\n xor %%ecx, %%ecx\n"
				     "pushfq\n pop %[now]\n pushfq\n andq $~0x40100, (%%rsp)\n popfq\n nop"
				     : "=a"(result), [now] "=&r"(now), "+b"(cpuid)
				     : [flags] "r"(changed), [code] "r"(code + 256), [at] "r"(memory + i * PAGE)
				     : "rcx", "r11", "memory", "cc");
			CHECK(result == pid);
			CHECK((now & (TF | AC)) == changed);
			sum += memory[i * PAGE];
		}
		// Calls may be several steps, or one.
		CHECK(sum == 8 && traps >= 8 * 7);
		munmap(memory, 8 * PAGE);
	}
}

static sigjmp_buf back;
static volatile int caught;
static void leave(int number, siginfo_t *info, void *context)
{
	(void)info, (void)context;
	STEPPED;
	// Handlers start with the interrupted program's AC.
	asm volatile("pushfq\n andq $~0x40100, (%%rsp)\n popfq" ::: "cc", "memory");
	caught = number;
	siglongjmp(back, 1);
}

#define SET_AC "pushfq\n orq $0x40000, (%%rsp)\n popfq\n"
#define CLEAR_AC "pushfq\n andq $~0x40000, (%%rsp)\n popfq\n"
#define CAUGHT(signal, ...) \
	do { \
		caught = 0; \
		if (sigsetjmp(back, 1) == 0) { \
			__VA_ARGS__; \
			CHECK(!"no signal"); \
		} \
		CHECK(caught == signal); \
	} while (0)

// EFLAGS.AC belongs to user mode: signals and system calls work while it is set, and it does not
// affect the kernel.
static void alignment_checks(void)
{
	static volatile uint64_t words[2];
	handle(SIGBUS, leave, SA_NODEFER);
	handle(SIGSEGV, leave, SA_NODEFER);
	handle(SIGILL, leave, SA_NODEFER);
	handle(SIGALRM, count_alarm, 0);
	for (int round = 0; round < 4; round++) {
		STEPPED;
		// QEMU's processor does not check alignment, so a test without a signal says
		// nothing on an emulated host.
		caught = 0;
		if (sigsetjmp(back, 1) == 0)
			asm volatile(SET_AC "movl 1(%0), %%eax\n" CLEAR_AC :: "r"(words) : "rax", "cc", "memory");
		CHECK(caught == 0 || caught == SIGBUS);
		CAUGHT(SIGSEGV, asm volatile(SET_AC "movl 0, %%eax\n" CLEAR_AC ::: "rax", "cc", "memory"));
		CAUGHT(SIGILL, asm volatile(SET_AC "ud2\n" CLEAR_AC ::: "cc", "memory"));
		CAUGHT(SIGSEGV, asm volatile(SET_AC "hlt\n" CLEAR_AC ::: "cc", "memory"));
		// System calls, with a wait and without, and a fork.
		long result, flags;
		asm volatile(SET_AC "syscall\n pushfq\n pop %1\n" CLEAR_AC
			     : "=a"(result), "=r"(flags) : "a"(SYS_getpid) : "rcx", "r11", "cc", "memory");
		CHECK(result == getpid() && flags & AC);
		struct timespec time = { 0, 20000000 };
		asm volatile(SET_AC "syscall\n pushfq\n pop %1\n" CLEAR_AC
			     : "=a"(result), "=r"(flags) : "a"(SYS_nanosleep), "D"(&time), "S"(0) : "rcx", "r11", "cc", "memory");
		CHECK(result == 0 && flags & AC);
		asm volatile(SET_AC "syscall\n pushfq\n pop %1\n" CLEAR_AC
			     : "=a"(result), "=r"(flags) : "a"(SYS_fork) : "rcx", "r11", "cc", "memory");
		CHECK(flags & AC);
		if (result == 0)
			_exit(5);
		expect_exit(result, 5);
		// Interrupts, and signals.
		struct itimerval often = { { 0, 2000 }, { 0, 2000 } }, never = { 0 };
		alarms = 0;
		setitimer(ITIMER_REAL, &often, NULL);
		asm volatile(SET_AC "1: cmpl $5, %1\n jl 1b\n pushfq\n pop %0\n" CLEAR_AC
			     : "=r"(flags) : "m"(alarms) : "cc", "memory");
		setitimer(ITIMER_REAL, &never, NULL);
		STEPPED;
		CHECK(flags & AC);
		// A page of its own, and memory of the kernel's that does not exist yet.
		uint8_t *memory = pages(16 * PAGE, PROT_READ | PROT_WRITE);
		asm volatile(SET_AC "movb $1, (%0)\n movb $1, 0x5000(%0)\n" CLEAR_AC :: "r"(memory) : "cc", "memory");
		CHECK(memory[0] + memory[0x5000] == 2);
		munmap(memory, 16 * PAGE);
	}
}

// --- Copies of code, and what they are copies of.

// A file in memory, mapped twice: to write, and to execute.
static int map_twice(uint8_t **writable, uint8_t **executable)
{
	int file = memfd_create("code", 0);
	CHECK(file >= 0 && ftruncate(file, PAGE) == 0);
	*writable = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	*executable = mmap(NULL, PAGE, PROT_READ | PROT_EXEC, MAP_SHARED, file, 0);
	CHECK(*writable != MAP_FAILED && *executable != MAP_FAILED);
	return file;
}

static void write_at(int file, const volatile uint8_t *bytes, size_t length, off_t at)
{
	uint8_t copy[64];
	put(copy, bytes, length);
	CHECK(pwrite(file, copy, length, at) == (ssize_t)length);
}

// What is written by another mapping, by a file or by the kernel for another process is what is
// executed next.
static void double_mappings(void)
{
	uint8_t *writable, *executable, seen[sizeof(get_pid)];
	int file = map_twice(&writable, &executable);
	function *call = (function *)(executable + 100);
	long pid = getpid(), parent = getppid();
	for (int round = 0; round < 8; round++) {
		PUT(writable + 100, get_pid);
		heat(call, pid);
		CHECK(!memcmp(writable + 100, (void *)get_pid, sizeof(get_pid)));
		CHECK(pread(file, seen, sizeof(seen), 100) == sizeof(seen) && !memcmp(seen, (void *)get_pid, sizeof(seen)));
		PUT(writable + 100, seven);
		CHECK(call() == 7);
		PUT(writable + 100, get_pid);
		heat(call, pid);
		write_at(file, seven, sizeof(seven), 100);
		CHECK(call() == 7);
		write_at(file, get_pid, sizeof(get_pid), 100);
		heat(call, pid);
	}
	for (int i = 0; i < 200; i++) {
		writable[101] = i % 2 ? SYS_getppid : SYS_getpid;
		CHECK(call() == (i % 2 ? parent : pid));
	}
}

// The same by another process, and by threads on other CPUs that serialize before they execute the
// code that the writer has announced.
static volatile unsigned turn, done;
static function *volatile shared_call;
static volatile long found, expected;
static void *execute_turns(void *unused)
{
	for (unsigned seen = 0; seen < 400;) {
		if (turn == seen) {
			sched_yield();
			continue;
		}
		seen = turn;
		unsigned a = 0, b, c = 0, d;
		asm volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d) :: "memory");
		found = shared_call();
		if (found != expected) {
			done = -1u;
			break;
		}
		done = seen;
	}
	return unused;
}

// Each round's code is a page of its own: one that is written often is not copied for a while.
#define FRESH 40
static void *execute_fresh(void *unused)
{
	for (unsigned next = 1; next < 2 * FRESH; next += 2) {
		while (turn != next)
			sched_yield();
		heat(shared_call, getpid());
		for (int i = 0; i < 32; i++) {
			sched_yield();
			heat(shared_call, getpid());
		}
		done = next;
		// In user mode all the time, where only an interrupt notifies this CPU of the
		// write; unless there is no other CPU.
		for (unsigned long spins = 1; turn != next + 1; spins++)
			if (spins % (1ul << 28) == 0)
				sched_yield();
		unsigned a = 0, b, c = 0, d;
		asm volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d) :: "memory");
		found = shared_call();
		done = next + 1;
	}
	return unused;
}

static void writers_of_fresh_code(void)
{
	pthread_t thread;
	turn = done = 0;
	CHECK(pthread_create(&thread, NULL, execute_fresh, NULL) == 0);
	for (unsigned next = 1; next < 2 * FRESH; next += 2) {
		uint8_t *writable, *executable;
		close(map_twice(&writable, &executable));
		PUT(writable + 100, get_pid);
		shared_call = (function *)(executable + 100);
		turn = next;
		while (done != next)
			sched_yield();
		PUT(writable + 100, seven);
		turn = next + 1;
		while (done != next + 1)
			sched_yield();
		CHECK(found == 7);
	}
	CHECK(pthread_join(thread, NULL) == 0);
}

static void writers_elsewhere(void)
{
	uint8_t *writable, *executable;
	map_twice(&writable, &executable);
	function *call = shared_call = (function *)(executable + 100);
	PUT(writable + 100, get_pid);
	heat(call, getpid());
	pid_t child = fork();
	if (child == 0) {
		PUT(writable + 100, seven);
		_exit(0);
	}
	expect_exit(child, 0);
	CHECK(call() == 7);
	pthread_t thread;
	CHECK(pthread_create(&thread, NULL, execute_turns, NULL) == 0);
	for (unsigned i = 1; i <= 400; i++) {
		int is_call = i / 8 % 2;
		if (is_call)
			PUT(writable + 100, get_pid);
		else
			PUT(writable + 100, seven);
		expected = is_call ? getpid() : 7;
		__sync_synchronize();
		turn = i;
		// The thread ends with a wrong result, too.
		while (done < i)
			sched_yield();
		CHECK(done == i && found == expected);
	}
	CHECK(pthread_join(thread, NULL) == 0);
	writers_of_fresh_code();
}

// Private mappings of files, and memory that is written by way of /proc.
static void written_files(void)
{
	char name[] = "/tmp/isolation-XXXXXX";
	int file = mkstemp(name), memory = open("/proc/self/mem", O_RDWR);
	CHECK(file >= 0 && memory >= 0 && ftruncate(file, PAGE) == 0);
	unlink(name);
	for (int round = 0; round < 4; round++) {
		write_at(file, get_pid, sizeof(get_pid), 100);
		uint8_t *code = mmap(NULL, PAGE, PROT_READ | PROT_EXEC, MAP_PRIVATE, file, 0);
		CHECK(code != MAP_FAILED);
		function *call = (function *)(code + 100);
		heat(call, getpid());
		write_at(file, seven, sizeof(seven), 100);
		CHECK(call() == 7);
		write_at(memory, get_pid, sizeof(get_pid), (off_t)(code + 100));
		heat(call, getpid());
		write_at(memory, seven, sizeof(seven), (off_t)(code + 100));
		CHECK(call() == 7);
		write_at(memory, get_pid, sizeof(get_pid), (off_t)(code + 100));
		heat(call, getpid());
		CHECK(munmap(code, PAGE) == 0);
	}
}

// A page with a hot system call that a device writes by DMA, for a read without the page cache. The
// sector is in the boot block, which no mounted file system writes: the next one, a superblock, may
// change between two reads.
static void device_writes(void)
{
	int disk = open("/dev/vda", O_RDONLY | O_DIRECT);
	uint8_t *writable, *executable, first[512] __attribute__((aligned(512)));
	// The test has its disk there, if it has one.
	if (disk < 0 || pread(disk, first, sizeof(first), BOOT_BLOCK) != sizeof(first))
		return;
	map_twice(&writable, &executable);
	for (int round = 0; round < 8; round++) {
		PUT(writable + 64, get_pid);
		heat((function *)(executable + 64), getpid());
		CHECK(pread(disk, writable, 512, BOOT_BLOCK) == 512);
		CHECK(!memcmp(writable, first, 512));
		CHECK(!memcmp(executable, first, 512));
	}
}

// The same by a device that only the test's driver uses, into a page of the driver that user mode
// executes (`check/check_device.c`).
static void driver_pages(void)
{
	const int rights[] = { PROT_READ | PROT_WRITE, PROT_READ | PROT_EXEC };
	static const uint8_t nothing[61];
	uint8_t *mapped[2];
	int driver = open("/dev/check_device", O_RDWR);
	CHECK(driver >= 0);
	for (int i = 0; i < 2; i++) {
		mapped[i] = mmap(NULL, PAGE, rights[i], MAP_SHARED, driver, 0);
		CHECK(mapped[i] != MAP_FAILED);
	}
	for (int round = 0; round < 3; round++) {
		PUT(mapped[0] + 64, get_pid);
		PUT(mapped[0] + 1024, seven);
		heat((function *)(mapped[1] + 64), getpid());
		// Whole words, and bytes at the border of a buffer.
		CHECK(pwrite(driver, nothing, sizeof(nothing), 64 + 7 * round) == sizeof(nothing));
		CHECK(!memcmp(mapped[0], mapped[1], PAGE));
		CHECK(((function *)(mapped[1] + 1024))() == 7);
	}
}

extern char hot_call[], quiet_place[];
asm(".text\n.balign 4096\n nop\n nop\nhot_call: mov $110, %eax\n syscall\n ret\n nop\n nop\nquiet_place: mov $5, %eax\n ret\n.balign 4096\n");

static long continued(pid_t child)
{
	struct user_regs_struct registers;
	CHECK(ptrace(PTRACE_CONT, child, 0, 0) == 0);
	int status = status_of(child);
	if (!WIFSTOPPED(status))
		return -1;
	CHECK(ptrace(PTRACE_GETREGS, child, 0, &registers) == 0);
	if (WSTOPSIG(status) != SIGTRAP)
		return 0;
	registers.rip--;
	CHECK(ptrace(PTRACE_SETREGS, child, 0, &registers) == 0);
	return registers.rip;
}

// A tracer's breakpoints in a page with a hot system call.
static void breakpoints(void)
{
	const int rounds = 6;
	pid_t child = fork();
	if (child == 0) {
		ptrace(PTRACE_TRACEME, 0, 0, 0);
		for (int i = 0; i < rounds; i++) {
			raise(SIGSTOP);
			heat((function *)hot_call, getppid());
			raise(SIGSTOP);
			((function *)quiet_place)();
		}
		_exit(3);
	}
	CHECK(WIFSTOPPED(status_of(child)));
	for (int i = 0; i < rounds; i++) {
		CHECK(continued(child) == 0);
		long text = ptrace(PTRACE_PEEKTEXT, child, quiet_place, 0);
		CHECK((text & 0xff) == 0xb8);
		CHECK(ptrace(PTRACE_POKETEXT, child, quiet_place, (text & ~0xffl) | 0xcc) == 0);
		CHECK(continued(child) == (long)quiet_place);
		CHECK(ptrace(PTRACE_POKETEXT, child, quiet_place, text) == 0);
		CHECK(continued(child) == (i + 1 < rounds ? 0 : -1));
	}
}

// The signal frame of a refused system call gives the address of the instruction.
static volatile long refused;
static void on_refused(int number, siginfo_t *info, void *context)
{
	(void)number;
	const uint8_t *behind = info->si_call_addr;
	refused = behind[-2] << 8 | behind[-1];
	((ucontext_t *)context)->uc_mcontext.gregs[REG_RAX] = 4711;
}

static void refused_calls(void)
{
	// mov eax, number; mov r9, [rsp+8]; xor eax, eax and mov eax, edi before the call, whose
	// number is getpid's, or read's.
	static const volatile uint8_t sixth[] = { 0x4c, 0x8b, 0x4c, 0x24, 0x08, 0x0f, 0x05, 0xc3 };
	static const volatile uint8_t zero[] = { 0x31, 0xc0, 0x0f, 0x05, 0xc3 };
	static const volatile uint8_t moved[] = { 0x89, 0xf8, 0x0f, 0x05, 0xc3 };
	uint8_t *code = pages(PAGE, PROT_READ | PROT_WRITE);
	memset(code, 0xcc, PAGE);
	PUT(code + 256, get_pid);
	PUT(code + 288, sixth);
	PUT(code + 320, zero);
	PUT(code + 352, moved);
	CHECK(mprotect(code, PAGE, PROT_READ | PROT_EXEC) == 0);
	struct sock_filter refuse[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_getpid, 1, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_read, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { sizeof(refuse) / sizeof(*refuse), refuse };
	for (int round = 0; round < 2; round++) {
		for (int at = 256; at < 384; at += 32)
			for (int i = 0; i < HOT; i++) {
				long result;
				asm volatile("call *%[code]" : "=a"(result)
					     : "a"(SYS_getpid), "D"(at == 320 ? -1 : SYS_getpid), "S"(0), "d"(0), [code] "r"(code + at)
					     : "rcx", "r9", "r11", "memory", "cc");
				refused = round ? refused : 0x0f05;
				CHECK(refused == 0x0f05);
				CHECK(round ? result == 4711 : at == 320 ? result == -EBADF : result == getpid());
				refused = 0;
			}
		if (round)
			break;
		handle(SIGSYS, on_refused, 0);
		CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
		CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
	}
	// `getpid` of the C library is refused from here on.
}

// A place that has become hot is entered at its system call, too, and its neighbours in the page
// stay what they were.
static void middle_of_calls(void)
{
	uint8_t *code = pages(PAGE, PROT_READ | PROT_WRITE), copy[PAGE];
	memset(code, 0x90, PAGE);
	PUT(code + 512, get_pid);
	memcpy(copy, code, PAGE);
	CHECK(mprotect(code, PAGE, PROT_READ | PROT_EXEC) == 0);
	heat((function *)(code + 512), getpid());
	for (int i = 0; i < HOT; i++) {
		long result;
		asm volatile("call *%1" : "=a"(result) : "r"(code + 517), "a"(SYS_getppid) : "rcx", "r11", "memory", "cc");
		CHECK(result == getppid());
	}
	// Sled of NOPs, of which some may have become a jump where nothing is executed.
	CHECK(((function *)(code + 400))() == getpid());
	CHECK(((function *)code)() == getpid());
}

// --- WRPKRU.

static unsigned pkru(void)
{
	unsigned low, high;
	asm volatile(".byte 0x0f, 0x01, 0xee" : "=a"(low), "=d"(high) : "c"(0));
	return low;
}

static void enter_with_zeros(void *at)
{
	long a = 0, c = 0, d = 0, di = 0, si = 0;
	caught = 0;
	if (sigsetjmp(back, 1) == 0)
		asm volatile("call *%5" : "+a"(a), "+c"(c), "+d"(d), "+D"(di), "+S"(si) : "r"(at)
			     : "memory", "cc", "rbx", "r8", "r9", "r10", "r11");
}

static void enter_call(void *at)
{
	long number = SYS_getpid;
	if (sigsetjmp(back, 1) == 0)
		asm volatile("call *%1" : "+a"(number) : "r"(at)
			     : "memory", "cc", "rbx", "rcx", "rdx", "rsi", "rdi", "r8", "r9", "r10", "r11");
}

// A page whose copy is older than the page when the call there is rewritten: what comes of both
// must not be a WRPKRU or an XRSTOR.
static void stale_copies(void)
{
	static const volatile uint8_t olds[][3] = { { 0x01, 0xef, 0xc3 }, { 0xae, 0x28, 0xc3 }, { 0xae, 0x2f, 0xc3 } };
	if (!strcmp(mode, "keys"))
		CHECK(pkru() == USER_PKRU);
	for (int number = SIGILL; number <= SIGSEGV; number++)
		if (number != SIGABRT && number != SIGKILL)
			handle(number, leave, SA_NODEFER);
	STEPPED;
	for (int round = 0; round < 24; round++) {
		uint8_t *writable, *executable;
		// Each of the old bytes behind each distance: one of them ends a jump with 0f.
		int at = round % 4 == 3 ? PAGE - 5 : 0x100, gap = 13 + round / 3 % 3;
		map_twice(&writable, &executable);
		memset(writable, 0xcc, PAGE);
		put(writable + at, get_pid + 5, 3);
		put(writable + at + 2, olds[round % 3], 3);
		for (volatile int i = 0; i < 3; i++)
			enter_call(executable + at);
		// What guest memory says now has room for a jump.
		if (at == 0x100) {
			memset(writable + at + 2, 0x90, 64);
			writable[at + 2 + gap] = 0xc3;
		}
		for (volatile int i = 0; i < HOT; i++)
			enter_call(executable + at);
		for (int offset = 1; offset < 6; offset++) {
			enter_with_zeros(executable + at + offset);
			// At once: a kernel entry and return would reset it.
			if (!strcmp(mode, "keys"))
				CHECK(pkru() == USER_PKRU);
		}
		// The pages stay: a place is rewritten once, and another address is another place.
	}
}

static void enter_with(uint8_t *at, unsigned accumulator, uint8_t *area, uint8_t *written)
{
	long a = accumulator, c = 0, d = 0;
	if (sigsetjmp(back, 1) == 0)
		asm volatile("call *%5" : "+a"(a), "+c"(c), "+d"(d), "+D"(area), "+S"(written) : "r"(at) : "memory", "cc");
}

// A page that has to be executed in steps, whose code writes to the page after it: the steps do not
// end with that page's mapping, neither in front of a WRPKRU of its own nor of an XRSTOR that
// crosses the border.
static void stepped_neighbours(void)
{
	static uint8_t area[PAGE] __attribute__((aligned(64)));
	// movb $0x90, 0x100(%rsi); what makes the page one of steps; both sequences and a return.
	static const volatile uint8_t store[] = { 0xc6, 0x86, 0, 1, 0, 0, 0x90 }, lone[] = { 0x0f, 0x01, 0xef, 0x90 };
	static const volatile uint8_t sequences[][4] = { { 0x0f, 0x01, 0xef, 0xc3 }, { 0x0f, 0xae, 0x2f, 0xc3 } };
	*(uint32_t *)(area + 24) = 0x1f80;
	*(uint64_t *)(area + 512) = 1 << 9;
	for (int number = SIGILL; number <= SIGSEGV; number++)
		if (number != SIGABRT && number != SIGKILL)
			handle(number, leave, SA_NODEFER);
	for (int round = 0; round < 8; round++) {
		uint8_t *code = pages(2 * PAGE, PROT_READ | PROT_WRITE | PROT_EXEC);
		const int crosses = round & 1, at = PAGE - (crosses ? 1 : 6) - (int)sizeof(store);
		memset(code, 0xc3, 2 * PAGE);
		PUT(code + 16, lone);
		PUT(code + at, store);
		put(code + at + sizeof(store), sequences[crosses], 4);
		enter_with(code + at, crosses << 9, area, code + PAGE);
		if (!strcmp(mode, "keys"))
			CHECK(pkru() == USER_PKRU);
		CHECK(code[PAGE + 0x100] == 0x90);
		munmap(code, 2 * PAGE);
	}
}

// Instructions across the ends of many pages, each of which could begin a sequence there: as in a
// large compiler, all of them stay executable at once.
static void page_ends(void)
{
	enum { COUNT = 256, ROUNDS = 5000 };
	// mov $0, %eax; movzbl %al, %eax; ret.
	static const volatile uint8_t crossing[] = { 0xb8, 0, 0, 0, 0, 0x0f, 0xb6, 0xc0, 0xc3 };
	uint8_t *code = pages((COUNT + 1) * PAGE, PROT_READ | PROT_WRITE);
	for (int i = 0; i < COUNT; i++) {
		uint8_t *at = code + (i + 1) * PAGE - 6;
		PUT(at, crossing);
		at[1] = i;
	}
	CHECK(mprotect(code, (COUNT + 1) * PAGE, PROT_READ | PROT_EXEC) == 0);
	for (int round = 0; round < ROUNDS; round++)
		for (int i = 0; i < COUNT; i++)
			CHECK(((function *)(code + (i + 1) * PAGE - 6))() == i);
}

// Jumps to where the process of a virtual CPU has memory of its own, or none: the guest's kernel
// gets the fault.
static void wild_jumps(void)
{
	static const uintptr_t places[] = { 0x71800000, 0x74010000, 0x76000000 };
	for (size_t i = 0; i < sizeof(places) / sizeof(*places); i++) {
		pid_t child = fork();
		if (child == 0) {
			((void (*)(void))places[i])();
			_exit(1);
		}
		int status = status_of(child);
		CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
	}
}

static sigjmp_buf after_fault;
static volatile uintptr_t fault_address, fault_rip;

static void on_fault(int number, siginfo_t *info, void *context)
{
	(void)number;
	fault_address = (uintptr_t)info->si_addr;
	fault_rip = ((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP];
	siglongjmp(after_fault, 1);
}

// The instruction before a system call, which a back end moves elsewhere, reads a page of the stack
// that is missing, or must not be read. The program finds it in its place.
static void call_stacks(void)
{
	// mov rdx, rsp; mov rsp, rdi; mov eax, SYS_getpid
	// mov r9, [rsp + 8]; syscall; mov rsp, rdx; ret
	static const volatile uint8_t code[] = {
		0x48, 0x89, 0xe2, 0x48, 0x89, 0xfc, 0xb8, SYS_getpid, 0, 0, 0,
		0x4c, 0x8b, 0x4c, 0x24, 0x08, 0x0f, 0x05, 0x48, 0x89, 0xd4, 0xc3,
	};
	enum { LOAD = 11 };
	uint8_t *text = pages(PAGE, PROT_READ | PROT_WRITE);
	PUT(text, code);
	CHECK(mprotect(text, PAGE, PROT_READ | PROT_EXEC) == 0);
	long (*call)(uint8_t *) = (void *)text;
	uint8_t *stack = pages(2 * PAGE, PROT_READ | PROT_WRITE), *next = stack + PAGE;
	stack[0] = next[0] = 1;
	for (int i = 0; i < HOT; i++)
		CHECK(call(next - 8) == getpid());
	for (int i = 0; i < HOT; i++) {
		CHECK(madvise(next, PAGE, MADV_DONTNEED) == 0);
		CHECK(call(next - 8) == getpid());
	}
	static uint8_t own_stack[1 << 16];
	stack_t other = { .ss_sp = own_stack, .ss_size = sizeof(own_stack) };
	CHECK(sigaltstack(&other, NULL) == 0);
	handle(SIGSEGV, on_fault, SA_ONSTACK);
	CHECK(mprotect(next, PAGE, PROT_NONE) == 0);
	for (int i = 0; i < HOT; i++) {
		if (sigsetjmp(after_fault, 1) == 0) {
			call(next - 8);
			CHECK(!"it reads a page without rights");
		}
		CHECK(fault_address == (uintptr_t)next && fault_rip == (uintptr_t)text + LOAD);
	}
}

// Rounds of own_code() are combinations of four bits. Where the program itself is executed in
// steps, a signal each, four rounds still have each bit set and clear.
#ifdef STEPS
#define OWN_CODE_STRIDE 5
#else
#define OWN_CODE_STRIDE 1
#endif

// An instruction that writes to a page that it is in itself is carried out, once, and what it
// writes is executed; also across the border of two pages, and where it is executed as a step.
static void own_code(void)
{
	static const volatile uint8_t lone[] = { 0x0f, 0x01, 0xef, 0x90 };
	// incb 0x100(%rsi); rep movsb; movb $5, to the immediate of the next instruction.
	static const volatile uint8_t increment[] = { 0xfe, 0x86, 0, 1, 0, 0, 0xc3 };
	static const volatile uint8_t copy[] = { 0xf3, 0xa4, 0xc3 };
	static const volatile uint8_t change[] = { 0xc6, 0x05, 1, 0, 0, 0, 5, 0xb8, 1, 0, 0, 0, 0xc3 };
	for (int round = 0; round < 16; round += OWN_CODE_STRIDE) {
		uint8_t *code = pages(2 * PAGE, PROT_READ | PROT_WRITE | PROT_EXEC);
		// One byte before the border, or two.
		const int crosses = round & 1, border = PAGE - 1 - (round >> 1 & 1);
		uint8_t *data = code + (round & 2 ? PAGE : 0);
		long result;
		memset(code, 0xc3, 2 * PAGE);
		if (round & 4)
			PUT(code + 16, lone);
		if (round & 8)
			PUT(code + PAGE + 16, lone);
		data[0x100] = 5;
		PUT(code + (crosses ? border : 64), increment);
		for (int i = 0; i < 3; i++)
			asm volatile("call *%0" :: "r"(code + (crosses ? border : 64)), "S"(data) : "memory", "cc");
		CHECK(data[0x100] == 8);
		PUT(code + (crosses ? border : 64), copy);
		memset(data + 0x300, 0x41, 12);
		const uint8_t *from = data + 0x300;
		uint8_t *to = data + 0x400;
		result = 12;
		asm volatile("call *%3" : "+S"(from), "+D"(to), "+c"(result) : "r"(code + (crosses ? border : 64)) : "memory", "cc");
		CHECK(result == 0 && to == data + 0x40c && !memcmp(data + 0x300, data + 0x400, 12));
		PUT(code + (crosses ? border - 4 : 64), change);
		CHECK(((function *)(code + (crosses ? border - 4 : 64)))() == 5);
		munmap(code, 2 * PAGE);
	}
}

// --- Features of the kernel that the host CPU does not provide.

static void watchpoints(void)
{
	static volatile long watched;
	pid_t child = fork();
	if (child == 0) {
		ptrace(PTRACE_TRACEME, 0, 0, 0);
		raise(SIGSTOP);
		watched = 5;
		_exit(3);
	}
	CHECK(WIFSTOPPED(status_of(child)));
	long set = ptrace(PTRACE_POKEUSER, child, offsetof(struct user, u_debugreg[0]), &watched);
	long enabled = ptrace(PTRACE_POKEUSER, child, offsetof(struct user, u_debugreg[7]), 0xd0101);
	CHECK(ptrace(PTRACE_CONT, child, 0, 0) == 0);
	int status = status_of(child);
	// It is hit, or has been refused.
	CHECK(WIFSTOPPED(status) || set != 0 || enabled != 0);
	kill(child, SIGKILL);
}

static void cpu_numbers(void)
{
	int count = sysconf(_SC_NPROCESSORS_ONLN);
	for (int cpu = 0; cpu < count; cpu++) {
		cpu_set_t set;
		CPU_ZERO(&set);
		CPU_SET(cpu, &set);
		CHECK(sched_setaffinity(0, sizeof(set), &set) == 0);
		for (int i = 0; i < HOT; i++) {
			unsigned own, node, called;
			CHECK(getcpu(&own, &node) == 0 && syscall(SYS_getcpu, &called, NULL, NULL) == 0);
			CHECK(own == called && own == (unsigned)cpu && node == 0 && sched_getcpu() == cpu);
		}
	}
}

static void time_stamps(void)
{
	handle(SIGSEGV, leave, SA_NODEFER);
	if (prctl(PR_SET_TSC, PR_TSC_SIGSEGV, 0, 0, 0) == 0)
		CAUGHT(SIGSEGV, asm volatile("rdtsc" ::: "rax", "rdx"));
}

// --- `--protection process`: what user mode can write of what its process and the kernel's share.

#define GATE 0x77000000ul
#define GATE_LENGTH 0x10000ul
#define GATE_WORDS (GATE_LENGTH / 4)
// Words of the first page, which user mode can read, that may be the counter to forge.
#define COUNTERS 8
// Words that the kernel's process could take for answers; behind them is a stack.
#define ANSWERS 8
#define ROUNDS 32
#define ROUNDS_ELSEWHERE (4 * COUNTERS * ANSWERS)
#define MARK 0x6b72616dul

static volatile uint32_t *const gate = (volatile uint32_t *)GATE;
// The words that user mode can write: from `answers` on, by number.
static long answers, answers_end;

static int is_accessible(volatile uint32_t *word, int write)
{
	if (sigsetjmp(back, 1))
		return 0;
	uint32_t value = *word;
	if (write)
		*word = value;
	return 1;
}

static int find_answers(void)
{
	if (strcmp(mode, "process"))
		return 0;
	if (getuid() == 0)
		CHECK(setgid(1000) == 0 && setuid(1000) == 0);
	handle(SIGSEGV, leave, SA_NODEFER);
	handle(SIGBUS, leave, SA_NODEFER);
	for (long page = GATE_WORDS / 1024 - 1; page >= 0; page--)
		if (is_accessible(gate + page * 1024, 1)) {
			answers = page * 1024;
			answers_end = answers_end ? answers_end : answers + 1024;
		}
	// The counters are in a page that can be read only.
	CHECK(answers > 0 && is_accessible(gate, 0) && !is_accessible(gate, 1));
	return 1;
}

// Writes one of the words, or all of them (-1).
static void forge(long word, uint32_t value)
{
	if (word >= 0)
		gate[answers + word] = value;
	for (long at = answers; word < 0 && at < answers_end; at++)
		gate[at] = value;
}

static uint8_t *marked(long count)
{
	uint8_t *memory = pages(count * PAGE, PROT_READ | PROT_WRITE);
	madvise(memory, count * PAGE, MADV_NOHUGEPAGE);
	for (long i = 0; i < count; i++)
		*(volatile uint64_t *)(memory + i * PAGE) = MARK;
	return memory;
}

static volatile long still_there;
static void expect_gone(uint8_t *memory, long count)
{
	still_there = 0;
	for (volatile long i = 0; i < count; i++)
		if (is_accessible((volatile uint32_t *)(memory + i * PAGE), 1))
			still_there++;
	CHECK(still_there == 0);
}

// Pages are unmapped when `munmap` returns, whatever user mode claims in advance that its process
// has done.
static void freed_pages(void)
{
	enum { COUNT = 16 };
	if (!find_answers())
		return;
	// A false claim may be too early or too late: repeat it often.
	for (int round = 0; round < ROUNDS; round++)
		for (long counter = 0; counter < COUNTERS; counter++)
			for (long word = -1; word < ANSWERS; word++) {
				uint8_t *memory = marked(COUNT);
				forge(word, gate[counter] + 1 + round % 2);
				munmap(memory, COUNT * PAGE);
				expect_gone(memory, 1);
			}
	// Each word, with values that are none of the counters' too.
	static const uint32_t values[] = { 0, ~0u, 0x80000000, GATE, 0x12345678 };
	for (long word = -1; word < answers_end - answers; word++) {
		uint8_t *memory = marked(1);
		forge(word, word % 2 ? values[(word + 1) / 2 % 5] : gate[2] + 1);
		munmap(memory, PAGE);
		expect_gone(memory, 1);
	}
}

// Each round's memory, and how far the round is: mapped by the other thread, freed, over.
static uint8_t *volatile elsewhere;
static volatile int stage;
static void *forge_elsewhere(void *unused)
{
	enum { COUNT = 16 };
	for (long round = 0; round < ROUNDS_ELSEWHERE; round++) {
		long word = round / COUNTERS % ANSWERS;
		while (stage != 1)
			sched_yield();
		for (long i = 0; i < COUNT; i++)
			CHECK(*(volatile uint64_t *)(elsewhere + i * PAGE) == MARK);
		stage = 2;
		while (stage == 2)
			forge(word, gate[round % COUNTERS] + 1);
		expect_gone(elsewhere, COUNT);
		stage = 0;
	}
	return unused;
}

// The same when another thread frees them, on another virtual CPU if there is one.
static void freed_elsewhere(void)
{
	enum { COUNT = 16 };
	pthread_t thread;
	if (!find_answers())
		return;
	CHECK(pthread_create(&thread, NULL, forge_elsewhere, NULL) == 0);
	for (long round = 0; round < ROUNDS_ELSEWHERE; round++) {
		elsewhere = marked(COUNT);
		stage = 1;
		while (stage != 2)
			sched_yield();
		CHECK(munmap(elsewhere, COUNT * PAGE) == 0);
		stage = 3;
		while (stage != 0)
			sched_yield();
	}
	CHECK(pthread_join(thread, NULL) == 0);
}

// --- Extended state.

static sigjmp_buf refusal;

static void on_refusal(int number, siginfo_t *info, void *context)
{
	(void)number, (void)info, (void)context;
	siglongjmp(refusal, 1);
}

// mov %esi, %eax; xor %edx, %edx; xrstor64 (%rdi); mov $1, %eax; ret. In this program's own code it
// would make all of its page be executed in another way with keys.
static const volatile uint8_t restoring[] = {
	0x89, 0xf0, 0x31, 0xd2, 0x48, 0x0f, 0xae, 0x2f, 0xb8, 1, 0, 0, 0, 0xc3
};

static int restore_state(uint8_t *code, const uint8_t *area, unsigned components)
{
	int (*restore)(const uint8_t *, unsigned) = (void *)code;
	if (sigsetjmp(refusal, 1))
		return 0;
	return restore(area, components);
}

// A signal frame's area in the compacted format works where the CPU has it and is refused
// elsewhere, and none of its contents remains for the process that runs next.
static void compacted_state(void)
{
	static uint8_t area[PAGE] __attribute__((aligned(64)));
	unsigned a = 1, b, c = 0, d;
	__asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
	if (!(c & 1u << 27))
		return;
	a = 0xd, c = 1;
	__asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
	const int works = a >> 1 & 1;
	*(uint32_t *)(area + 24) = 0x1f80;
	*(uint64_t *)(area + 512) = 2;
	*(uint64_t *)(area + 520) = 1ul << 63 | 3;
	handle(SIGSEGV, on_refusal, 0);
	uint8_t *code = pages(PAGE, PROT_READ | PROT_WRITE);
	PUT(code, restoring);
	CHECK(mprotect(code, PAGE, PROT_READ | PROT_EXEC) == 0);
	for (int i = 0; i < 20; i++) {
		pid_t child = fork();
		CHECK(child >= 0);
		if (child == 0)
			_exit(restore_state(code, area, 3) == works ? i : 100);
		CHECK(restore_state(code, area, 3) == works);
		expect_exit(child, i);
	}
}

// A copy by the kernel that begins in user memory just below the kernel's own ends there.
static void kernel_copies(void)
{
	const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
	const size_t last = 16;
	char *page = mmap((void *)(KERNEL - PAGE), PAGE, PROT_READ | PROT_WRITE, flags, -1, 0);
	CHECK(page == (void *)(KERNEL - PAGE));
	memset(page, 1, PAGE);
	int ends[2];
	CHECK(pipe(ends) == 0);
	CHECK(write(ends[1], page + PAGE - last, PAGE) <= (ssize_t)last);
	CHECK(write(ends[1], page, PAGE) == PAGE);
	CHECK(read(ends[0], page + PAGE - last, PAGE) <= (ssize_t)last);
}

static const struct {
	const char *name;
	void (*run)(void);
} tests[] = {
	{ "kernel-copies", kernel_copies },
	{ "compacted-state", compacted_state },
	{ "large-filters", large_filters },
	{ "filter-constants", filter_constants },
	{ "stepped-calls", stepped_calls },
	{ "traced-steps", traced_steps },
	{ "steps-everywhere", steps_everywhere },
	{ "alignment-checks", alignment_checks },
	{ "double-mappings", double_mappings },
	{ "writers-elsewhere", writers_elsewhere },
	{ "written-files", written_files },
	{ "device-writes", device_writes },
	{ "driver-pages", driver_pages },
	{ "breakpoints", breakpoints },
	{ "refused-calls", refused_calls },
	{ "middle-of-calls", middle_of_calls },
	{ "call-stacks", call_stacks },
	{ "stale-copies", stale_copies },
	{ "stepped-neighbours", stepped_neighbours },
	{ "page-ends", page_ends },
	{ "wild-jumps", wild_jumps },
	{ "own-code", own_code },
	{ "watchpoints", watchpoints },
	{ "cpu-numbers", cpu_numbers },
	{ "time-stamps", time_stamps },
	{ "freed-pages", freed_pages },
	{ "freed-elsewhere", freed_elsewhere },
};

int main(int arguments, char **argument)
{
	const size_t count = sizeof(tests) / sizeof(*tests);
	int failures = 0;
	if (arguments < 2) {
		fprintf(stderr, "usage: isolation MODE [TEST...]\n");
		return 64;
	}
	mode = argument[1];
	setvbuf(stdout, NULL, _IOLBF, 0);
	for (int at = 2; at < arguments; at++) {
		size_t i = 0;
		while (i < count && strcmp(argument[at], tests[i].name))
			i++;
		if (i == count) {
			printf("isolation: %s FAILED: no such test\n", argument[at]);
			return 64;
		}
	}
	for (size_t i = 0; i < count; i++) {
		int wanted = arguments == 2;
		for (int at = 2; at < arguments; at++)
			wanted |= !strcmp(argument[at], tests[i].name);
		if (!wanted)
			continue;
		pid_t child = fork();
		if (child == 0) {
			// No handler of the test's: SIGALRM may be its own.
			struct itimerval limit = { .it_value = { TIME, 0 } };
			setitimer(ITIMER_PROF, &limit, NULL);
			tests[i].run();
			_exit(0);
		}
		int status = status_of(child);
		if (status) {
			printf("isolation: %s FAILED: %#x\n", tests[i].name, status);
			failures++;
		}
	}
	if (!failures)
		printf("isolation: all well with %s\n", mode);
	return failures != 0;
}
