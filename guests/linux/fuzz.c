// SPDX-License-Identifier: Apache-2.0
// Random user programs, for guests whose user mode and kernel are processes of a host (`parador
// run`).
//
// `fuzz MODE SEED COUNT` runs COUNT programs, as many at a time as there are CPUs; MODE is the
// argument of `--protection`. Program n is made from SEED + n: code of random bytes and of
// sequences that matter to the isolation, system calls with random arguments, mappings, signals,
// forged signal frames, and writes to code through other mappings, by files and by other processes.
// Each runs as a user of its own, and ends or is killed. What must hold:
//
// - `keys`: PKRU is user mode's value behind all code that returns, and in signal handlers.
// - `keys`, `process`: no memory of the kernel, of the wedge or of guest memory is readable.
// - A page that the kernel has unmapped, or whose rights it has taken, is not accessible.
// - Code that was written is what is executed: at once, with `keys` after the next flush.
// - Memory and vector registers of a neighbour, of this process, and the file of this program do
//   not change.
//
// With `none` user mode can reach its kernel, so code consists of instructions that do not try to.
//
// With FUZZ_SAYS in the environment the number of each program is printed before it runs.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#define PAGE 4096ul
// The first user of the programs; each worker has its own.
#define USER 1000
// Milliseconds that a program may take before it is killed, and a piece of its code, in
// microseconds: more on an emulated host.
#define LIMIT 3000
#define SLICE (mode == KEYS ? 60000 : 15000)
// PKRU of user mode with `--protection keys` (`wedge_x86::PROGRAM_RIGHTS`).
#define USER_PKRU 0xffffffecu
// Steps of a program.
#define STEPS 24
// EFLAGS that a forged frame may have: TF, IF, DF, IOPL, NT, RF, AC, ID.
#define ODD_FLAGS 0x257700l

// Memory of a program, at addresses that instructions can hold as signed 32-bit numbers. No byte of
// an address is a far return: QEMU 7.2 does those of user mode with the rights of a kernel.
#define ARENA 0x30000000ul
#define PAGES 6
// The file's pages, to execute and to write; memory that is both; a stack; an area of extended
// state.
#define EXECUTABLE ARENA
#define WRITABLE (ARENA + 0x100000)
#define BOTH (ARENA + 0x200000)
#define STACK (ARENA + 0x300000)
#define STATE (ARENA + 0x400000)

// What programs must not read (`proto::hosted::layout`).
#define IMAGE 0x40000000ul
#define SHARED 0x71000000ul
#define STUBS 0x72000000ul
#define PRIVATE 0x74000000ul
#define CALL_STUBS 0x74ce0000ul
#define GATE 0x77000000ul
#define DIRECT 0x400000000000ul
#define WINDOW 0x700000000000ul
#define COPIES 0x740000000000ul
static const uint64_t closed[] = {
	IMAGE + 0x1000000, IMAGE + 0x1800000, DIRECT + 0x1000, DIRECT + 0x1000000, WINDOW + 0x1000000, COPIES + 0x1000000,
	SHARED, SHARED + 0x1000, SHARED + 0x4000, STUBS, PRIVATE + PAGE, CALL_STUBS,
};

#define LENGTH(array) (sizeof(array) / sizeof(*(array)))

enum mode { NONE, PROCESS, KEYS };
static enum mode mode;

// What all processes see; programs do not know where it is.
struct report {
	volatile uint64_t runs, signals, system_calls, model_calls, probes;
	volatile uint64_t is_over, kind, seed, step, value, expected;
};
static struct report *report;

// Reports evidence and ends this process, without the C library: thread-local storage may be gone.
__attribute__((noreturn, noinline)) static void violation(uint64_t kind, uint64_t value, uint64_t expected);

// --- Random numbers.

static uint64_t state, program_seed, step;

static uint64_t next(void)
{
	uint64_t value = state += 0x9e3779b97f4a7c15ul;
	value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9ul;
	value = (value ^ value >> 27) * 0x94d049bb133111ebul;
	return value ^ value >> 31;
}

static uint64_t below(uint64_t limit)
{
	return next() % limit;
}

static int one_in(uint64_t times)
{
	return below(times) == 0;
}

#define ANY(array) ((array)[below(LENGTH(array))])

__attribute__((noreturn, noinline)) static void violation(uint64_t kind, uint64_t value, uint64_t expected)
{
	report->seed = program_seed;
	report->step = step;
	report->value = value;
	report->expected = expected;
	report->kind = kind;
	for (;;)
		asm volatile("syscall" :: "a"(SYS_exit_group), "D"(0) : "rcx", "r11", "memory");
}

// --- Code of a program, and the ways back from it.

enum { RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI };
struct registers {
	uint64_t gpr[16], target;
};
static struct registers at_run __attribute__((used));
static uint64_t kept_stack __attribute__((used)), kept_fs __attribute__((used));
static volatile uint32_t is_running __attribute__((used)), has_keys __attribute__((used));
// PKRU behind code, read twice: code that jumps behind one RDPKRU comes to the other, and a wrong
// value is one that both have read.
static volatile uint32_t found_pkru[2] __attribute__((used));
static volatile uint32_t has_read __attribute__((used));
static const uint32_t initial_mxcsr __attribute__((used)) = 0x1f80;
static pid_t own_thread;

// Jumps with all registers of `at_run`.
void run_registers(void);
// The end of code, with any registers; where signal handlers continue, with `kept_stack`; the flags
// are set there.
extern char returned[], landed[];
// Reads what RDI says.
extern char read_byte[], write_byte[];
asm(".text\n"
    "run_registers:\n"
    "	push %rbx\n	push %rbp\n	push %r12\n	push %r13\n	push %r14\n	push %r15\n"
    "	mov %rsp, kept_stack(%rip)\n	movl $1, is_running(%rip)\n"
    "	mov at_run+0x08(%rip), %rcx\n	mov at_run+0x10(%rip), %rdx\n	mov at_run+0x18(%rip), %rbx\n"
    "	mov at_run+0x20(%rip), %rsp\n	mov at_run+0x28(%rip), %rbp\n	mov at_run+0x30(%rip), %rsi\n"
    "	mov at_run+0x38(%rip), %rdi\n	mov at_run+0x40(%rip), %r8\n	mov at_run+0x48(%rip), %r9\n"
    "	mov at_run+0x50(%rip), %r10\n	mov at_run+0x58(%rip), %r11\n	mov at_run+0x60(%rip), %r12\n"
    "	mov at_run+0x68(%rip), %r13\n	mov at_run+0x70(%rip), %r14\n	mov at_run+0x78(%rip), %r15\n"
    "	mov at_run(%rip), %rax\n"
    "	jmp *at_run+0x80(%rip)\n"
    "returned:\n"
    "	cmpl $0, has_keys(%rip)\n	je 1f\n"
    "	xor %ecx, %ecx\n	.byte 0x0f, 0x01, 0xee\n	mov %eax, found_pkru(%rip)\n"
    "	xor %ecx, %ecx\n	.byte 0x0f, 0x01, 0xee\n	mov %eax, found_pkru+4(%rip)\n"
    "1:	mov kept_stack(%rip), %rsp\n"
    "landed:\n"
    "	pushq $2\n	popfq\n"
    "	mov $158, %eax\n	mov $0x1002, %edi\n	mov kept_fs(%rip), %rsi\n	syscall\n"
    "	fninit\n	ldmxcsr initial_mxcsr(%rip)\n	movl $0, is_running(%rip)\n"
    "	pop %r15\n	pop %r14\n	pop %r13\n	pop %r12\n	pop %rbp\n	pop %rbx\n	ret\n"
    "read_byte:\n"
    "	mov (%rdi), %al\n	movl $1, has_read(%rip)\n	jmp returned\n"
    "write_byte:\n"
    "	mov %al, (%rdi)\n	movl $1, has_read(%rip)\n	jmp returned\n");

static uint32_t pkru(void)
{
	uint32_t low, high;
	asm volatile(".byte 0x0f, 0x01, 0xee" : "=a"(low), "=d"(high) : "c"(0));
	return low;
}

enum { PKRU_BEHIND_CODE = 1, PKRU_IN_HANDLER, KERNEL_READ, UNMAPPED, RIGHTS, STALE, NEIGHBOUR, REGISTERS, OWN_MEMORY };
static const char *const kinds[] = {
	"nothing", "PKRU behind code", "PKRU in a signal handler", "kernel memory was read", "an unmapped page is accessible",
	"a page has rights that were taken", "other code than was written", "a neighbour's memory", "a neighbour's registers",
	"memory of the parent",
};

// No thread-local storage: its base may be anything here.
__attribute__((optimize("no-stack-protector"))) static void on_signal(int number, siginfo_t *info, void *context)
{
	greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
	(void)info;
	if (has_keys && pkru() != USER_PKRU)
		violation(PKRU_IN_HANDLER, pkru(), USER_PKRU);
	if (!is_running) {
		if (number != SIGALRM)
			for (;;)
				asm volatile("syscall" :: "a"(SYS_exit_group), "D"(0) : "rcx", "r11", "memory");
		return;
	}
	report->signals++;
	registers[REG_RIP] = (long)landed;
	registers[REG_RSP] = kept_stack;
	registers[REG_EFL] = 2;
	registers[REG_CSGSFS] = 0x33 | 0x2bl << 48;
}

static void set_timer(long microseconds)
{
	setitimer(ITIMER_REAL, &(struct itimerval){ { 0, microseconds }, { 0, microseconds } }, NULL);
}

static void run_to_end(uint64_t target)
{
	uint64_t *stack = (uint64_t *)STACK;
	for (size_t i = 0; i < PAGE / 8; i++)
		stack[512 + i] = (uint64_t)returned;
	at_run.target = target;
	found_pkru[0] = found_pkru[1] = USER_PKRU;
	run_registers();
	report->runs++;
	// A copy of this process that the code has made.
	if (syscall(SYS_gettid) != own_thread)
		syscall(SYS_exit_group, 0);
	if (has_keys && found_pkru[0] != USER_PKRU && found_pkru[1] != USER_PKRU)
		violation(PKRU_BEHIND_CODE, found_pkru[1], USER_PKRU);
}

// Code that may be a loop.
static void run_at(uint64_t target)
{
	set_timer(SLICE);
	run_to_end(target);
	set_timer(0);
}

static int is_accessible(uint64_t address, int write)
{
	memset(&at_run, 0, sizeof(at_run));
	at_run.gpr[RSP] = STACK + PAGE + 2048;
	at_run.gpr[RDI] = address;
	has_read = 0;
	run_to_end((uint64_t)(write ? write_byte : read_byte));
	report->probes++;
	return has_read;
}

// --- Pieces of code.

static uint8_t code[512];
static size_t used;

static void put(const void *bytes, size_t length)
{
	if (used + length <= sizeof(code) - 1)
		memcpy(code + used, bytes, length);
	else
		length = 0;
	used += length;
}

static void put_number(uint64_t value, size_t length)
{
	put(&value, length);
}

// Text that is bytes: it is not in this program's own code.
static void put_hex(const char *text)
{
	for (unsigned byte; sscanf(text, "%2x", &byte) == 1; text += 2) {
		put_number(byte, 1);
		while (text[2] == ' ')
			text++;
	}
}

// What may become a sequence with what is beside it.
static const uint8_t bytes_that_matter[] = { 0x0f, 0x01, 0xee, 0xef, 0xae, 0x28, 0x2f, 0x6f, 0x05, 0x34, 0xcd, 0x80, 0xcc, 0x90, 0xc3, 0xeb, 0x48, 0x66 };

// Sequences that change PKRU, in all surroundings.
static const char *const openings[] = {
	"0f 01 ef", "0f 01 ef 31 c0 c3", "0f 01 ef 90 c3", "66 0f 01 ef c3", "f3 0f 01 ef", "f2 0f 01 ef", "48 0f 01 ef c3", "2e 0f 01 ef",
	"b8 0f 01 ef c3", "eb 01 b8 0f 01 ef c3", "48 b8 0f 01 ef c3 0f 01 ef c3", "eb 02 48 b8 0f 01 ef c3 90 90 90 90",
	"31 c0 31 c9 31 d2 0f 01 ef", "6a 02 9d 0f 01 ef c3", "8c d3 8e d3 0f 01 ef c3", "c7 f8 00 00 00 00 0f 01 ef c3", "0f 05 01 ef c3", "0f 0f 01 ef c3",
	"0f ae 2f c3", "48 0f ae 2f c3", "31 d2 0f ae 2f c3", "31 d2 48 0f ae 2f c3", "0f ae 28", "0f ae 6f 00 c3", "0f ae ac 27 00 00 00 00 c3",
	"b8 00 02 00 00 31 d2 48 0f ae 2f c3", "0f c7 1f c3", "0f 05 ae 2f c3",
};
// Ways into the kernel and what changes a program's own state.
static const char *const plain[] = {
	"0f 05", "cd 80", "cd 74", "cc", "f1", "0f 0b", "9c 58", "6a 02 9d", "68 02 01 00 00 9d", "68 02 00 04 00 9d", "68 02 01 04 00 9d", "90 90 90", "f4",
	"fc", "fd", "f3 a4", "f3 aa", "0f a2", "0f 31", "0f 01 d0", "f3 90", "eb 02 90 90", "e8 00 00 00 00 58", "54 5c", "0f 77", "9b db e3",
	"0f ae f0", "0f ae 27", "48 0f ae 27", "0f ae 0f", "0f ae 07", "8c d0", "50 58", "c8 10 00 00 c9", "0f 01 ee",
};
static const char *const privileged[] = {
	"0f 34", "0f 35", "0f 07", "ff 1c 24", "ff 2c 24", "48 ff 2f", "8e d0", "8e c0", "8e e0", "8e e8", "0f 20 c0", "0f 22 c0", "0f 01 f8", "0f 01 17", "0f 00 d8",
	"0f 30", "0f 32", "fa", "fb", "e4 60", "ee", "f3 48 0f ae d0", "f3 48 0f ae d8", "f3 48 0f ae c0", "0f 09", "0f 01 c1", "0f 01 d9", "0f 01 ca", "0f 01 cb", "c7 f8 00 00 00 00",
};
// Where a far return of user mode does not end the host (`at_jump`).
static const char *const far_returns[] = { "cb", "48 cb", "cf", "48 cf", "ca 08 00" };

static const uint16_t calls[] = {
	SYS_mmap, SYS_mprotect, SYS_munmap, SYS_mremap, SYS_madvise, SYS_brk, SYS_rt_sigaction, SYS_rt_sigprocmask, SYS_rt_sigreturn,
	SYS_sigaltstack, SYS_arch_prctl, SYS_getpid, SYS_getppid, SYS_gettid, SYS_clone, SYS_fork, SYS_vfork, SYS_tgkill, SYS_prctl,
	SYS_memfd_create, SYS_pwrite64, SYS_modify_ldt, SYS_set_thread_area, SYS_set_tid_address, SYS_set_robust_list, SYS_futex,
	SYS_membarrier, SYS_rseq, SYS_ptrace, SYS_process_vm_readv, SYS_process_vm_writev, SYS_seccomp, SYS_userfaultfd, SYS_mlock, SYS_msync,
	SYS_mincore, SYS_remap_file_pages, SYS_pkey_mprotect, SYS_pkey_alloc, SYS_iopl, SYS_personality, SYS_sched_yield, SYS_read, SYS_write, SYS_getcpu,
	SYS_shmget, SYS_shmat, SYS_execve, SYS_exit, SYS_kill, SYS_timer_create, SYS_setitimer,
};

// With `none`, nothing that could be an address of the kernel.
static uint64_t any_word(void)
{
	switch (below(mode == NONE ? 8 : 11)) {
	case 0: case 1: case 2: return 0;
	case 3: return EXECUTABLE + below(PAGES * PAGE);
	case 4: return WRITABLE + below(PAGES * PAGE);
	case 5: return BOTH + below(PAGES * PAGE);
	case 6: return STATE;
	case 7: return below(64);
	case 8: return ANY(closed) + below(PAGE);
	case 9: return mode == PROCESS ? GATE + below(0x10000) : USER_PKRU;
	default: return next();
	}
}

static void put_store(uint64_t here)
{
	// A byte, a word or four bytes of what is executed soon, by another mapping.
	uint64_t from = (here >= BOTH && here < STACK) ? BOTH : EXECUTABLE;
	uint64_t to = (from == BOTH ? BOTH : WRITABLE) + (here - from + 7 + below(24)) % (PAGES * PAGE);
	size_t length = 1ul << below(3);
	if (length == 2)
		put_number(0x66, 1);
	put_number(length == 1 ? 0xc6 : 0xc7, 1);
	put_hex("04 25");
	put_number(to, 4);
	for (size_t i = 0; i < length; i++)
		put_number(ANY(bytes_that_matter), 1);
}

static void put_call(void)
{
	static const char *const ways[] = { "0f 05", "0f 05", "0f 05", "cd 80", "0f 34" };
	put_number(0xb8, 1);
	put_number(one_in(8) ? below(480) : ANY(calls), 4);
	put_hex(ways[below(mode == NONE ? 4 : 5)]);
	report->system_calls++;
}

// One piece that begins at an address.
static void put_piece(uint64_t here)
{
	switch (below(mode == NONE ? 8 : 16)) {
	case 0: case 1: put_store(here); break;
	case 2: case 3: put_call(); break;
	case 4: put_hex("b8 27 00 00 00 0f 05"); break;
	case 5: case 6: case 7: put_hex(ANY(plain)); break;
	case 8: put_hex(ANY(privileged)); break;
	case 9:
		if (mode == PROCESS)
			put_hex(ANY(far_returns));
		break;
	case 10: {
		// A load or a store of the accumulator, anywhere.
		put_hex(one_in(2) ? "48 a1" : "48 a3");
		put_number(any_word(), 8);
		break;
	}
	case 11:
		for (uint64_t i = 1 + below(8); i != 0; i--)
			put_number(one_in(3) ? ANY(bytes_that_matter) : next() & 0xff, 1);
		break;
	default: put_hex(ANY(openings)); break;
	}
}

static void no_far_returns(size_t from)
{
	for (size_t i = from; mode == KEYS && i < used; i++)
		if (code[i] == 0xcb || code[i] == 0xca || code[i] == 0xcf)
			code[i] = 0x90;
}

// Code that begins at an address; behind each piece it may end.
static void make_code(uint64_t here)
{
	used = 0;
	for (uint64_t pieces = 1 + below(6); pieces != 0; pieces--) {
		size_t from = used;
		put_piece(here + used);
		no_far_returns(from);
	}
	code[used++] = 0xc3;
}

// --- Steps of programs that do anything.

static int file, memory_file;

static void any_registers(void)
{
	for (int i = 0; i < 16; i++)
		at_run.gpr[i] = any_word();
	// As WRPKRU and XRSTOR take them.
	if (!one_in(4)) {
		at_run.gpr[RAX] = one_in(2) ? 0 : 0x200;
		at_run.gpr[RCX] = at_run.gpr[RDX] = 0;
		at_run.gpr[RDI] = STATE;
	}
	at_run.gpr[RSP] = STACK + PAGE + 2048;
}

// Somewhere in the executable pages; often so that code goes over a border.
static uint64_t any_place(void)
{
	uint64_t page = below(PAGES - 1), offset = one_in(2) ? PAGE - 1 - below(24) : 16 * below(250);
	return (one_in(4) ? BOTH : EXECUTABLE) + page * PAGE + offset;
}

// Writes the code, by any mapping.
static void write_code(uint64_t to)
{
	uint64_t offset = to - EXECUTABLE;
	if (to >= BOTH)
		memcpy((void *)to, code, used);
	else if (one_in(3))
		(void)!pwrite(file, code, used, offset);
	else if (memory_file >= 0 && one_in(3))
		(void)!pwrite(memory_file, code, used, to);
	else
		memcpy((void *)(WRITABLE + offset), code, used);
}

static void execute_new(void)
{
	uint64_t at = any_place();
	make_code(at);
	write_code(at);
	for (uint64_t times = one_in(3) ? 12 : 1 + below(3); times != 0; times--) {
		// Anywhere in it, but for modes in which it matters what an instruction is.
		uint64_t entry = mode == NONE || one_in(2) ? 0 : below(used);
		any_registers();
		run_at(at + entry);
	}
}

// Code becomes other code while its page is hot, with and without a flush.
static void change_hot(void)
{
	static const char *const before[] = { "b8 27 00 00 00 0f 05 c3", "0f 05 01 ef c3", "0f 05 ae 2f c3", "31 c0 0f 05 c3", "4c 8b 4c 24 08 0f 05 c3" };
	uint64_t at = any_place();
	used = 0;
	put_hex(before[mode == NONE && below(2) ? 0 : mode == NONE ? 3 : below(LENGTH(before))]);
	write_code(at);
	for (int i = 0; i < 6; i++) {
		any_registers();
		at_run.gpr[RAX] = SYS_getpid;
		run_at(at);
	}
	used = 2;
	for (uint64_t bytes = 8 + below(24); bytes != 0; bytes--)
		put_number(mode == NONE || !one_in(4) ? 0x90 : ANY(bytes_that_matter), 1);
	no_far_returns(0);
	code[used++] = 0xc3;
	write_code(at);
	if (one_in(2))
		mprotect((void *)(at & -PAGE), PAGE, PROT_READ | PROT_EXEC | (at >= BOTH ? PROT_WRITE : 0));
	for (uint64_t i = 0; i < 12; i++) {
		any_registers();
		at_run.gpr[RAX] = i < 8 ? SYS_getpid : 0;
		run_at(at + (i < 8 || mode == NONE ? 0 : i - 7));
	}
}

static void change_mappings(void)
{
	uint64_t page = below(PAGES) * PAGE;
	int rights[] = { PROT_READ | PROT_EXEC, PROT_READ, PROT_NONE, PROT_EXEC, PROT_READ | PROT_WRITE | PROT_EXEC };
	switch (below(6)) {
	case 0:
		mmap((void *)(EXECUTABLE + page), PAGE, PROT_READ | PROT_EXEC, MAP_SHARED | MAP_FIXED, file, below(PAGES) * PAGE);
		break;
	case 1:
		mmap((void *)(EXECUTABLE + page), PAGE, PROT_READ | PROT_EXEC, MAP_PRIVATE | MAP_FIXED, file, below(PAGES) * PAGE);
		break;
	case 2: mprotect((void *)(EXECUTABLE + page), PAGE, ANY(rights)); break;
	case 3: mprotect((void *)(BOTH + page), PAGE, ANY(rights)); break;
	case 4: madvise((void *)(BOTH + page), PAGE, MADV_DONTNEED); break;
	default:
		munmap((void *)(EXECUTABLE + page), PAGE);
		if (one_in(2))
			mremap((void *)(BOTH + page), PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, EXECUTABLE + page);
	}
}

// What a piece may have taken away.
static void restore_mappings(void)
{
	if (mmap((void *)WRITABLE, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED)
		_exit(0);
	for (uint64_t page = 0; page < PAGES; page++) {
		mprotect((void *)(EXECUTABLE + page * PAGE), PAGE, PROT_READ | PROT_EXEC);
		if (mprotect((void *)(BOTH + page * PAGE), PAGE, PROT_READ | PROT_WRITE | PROT_EXEC))
			mmap((void *)(BOTH + page * PAGE), PAGE, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
	}
	int rights = PROT_READ | PROT_WRITE;
	mmap((void *)STACK, 3 * PAGE, rights, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
	mmap((void *)STATE, 2 * PAGE, rights, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
	// An area that says that PKRU is 0.
	*(uint32_t *)(STATE + 24) = initial_mxcsr;
	*(uint64_t *)(STATE + 512) = 1 << 9;
	if (one_in(4))
		*(uint64_t *)(STATE + 520) = 1ul << 63 | 1 << 9;
}

// A signal frame that no signal has made.
static void forge_frame(void)
{
	static const uint16_t selectors[] = { 0x33, 0x33, 0x23, 0x2b, 0, 0x10, 0x1b, 0x43 };
	uint64_t *context = (uint64_t *)STACK, at = any_place();
	make_code(at);
	write_code(at);
	memset(context, 0, PAGE);
	for (int i = 0; i < 15; i++)
		context[5 + i] = any_word();
	context[5 + 12] = context[5 + 13] = context[5 + 14] = 0;
	context[5 + 15] = STACK + PAGE + 2048;
	context[5 + 16] = one_in(4) ? (uint64_t)returned : at;
	context[5 + 17] = one_in(2) ? 0x202 : 0x202 | (next() & ODD_FLAGS);
	context[5 + 18] = ANY(selectors) | (one_in(2) ? 0x2bul : (uint64_t)ANY(selectors)) << 48;
	if (mode != NONE && one_in(3)) {
		// `struct _fpx_sw_bytes`, with PKRU among what is there.
		context[5 + 23] = STATE;
		memcpy((void *)(STATE + 464), (uint64_t[]){ 0x46505853 | 0x2000ul << 32, 0x207, 0x1000 }, 24);
	}
	used = 0;
	put_hex("b8 0f 00 00 00 0f 05 c3");
	write_code(at + 512 < EXECUTABLE + PAGES * PAGE || at >= BOTH ? at + 512 : at - 512);
	any_registers();
	at_run.gpr[RSP] = STACK;
	run_at(at + 512 < EXECUTABLE + PAGES * PAGE || at >= BOTH ? at + 512 : at - 512);
}

// A handler of the program's own making, and a stack for it that may be anywhere.
static void signal_itself(void)
{
	uint64_t at = any_place();
	make_code(at);
	write_code(at);
	struct sigaction action = { .sa_handler = (void (*)(int))at, .sa_flags = next() & (SA_NODEFER | SA_RESETHAND | SA_SIGINFO) };
	sigaction(SIGUSR1, &action, NULL);
	used = 0;
	put_hex("0f 05 c3");
	memcpy((void *)(BOTH + 3072), code, used);
	memset(&at_run, 0, sizeof(at_run));
	at_run.gpr[RAX] = SYS_kill;
	at_run.gpr[RDI] = getpid();
	at_run.gpr[RSI] = SIGUSR1;
	at_run.gpr[RSP] = STACK + PAGE + 2048;
	run_at(BOTH + 3072);
}

// Another process changes the code while this one executes it.
static void change_elsewhere(void)
{
	pid_t other = fork();
	if (other == 0) {
		own_thread = syscall(SYS_gettid);
		for (int i = 0; i < 400; i++)
			*(volatile uint8_t *)(WRITABLE + below(PAGES * PAGE)) = mode == NONE ? 0x90 : ANY(bytes_that_matter);
		_exit(0);
	}
	for (int i = 0; i < 6; i++) {
		any_registers();
		run_at(mode == NONE ? (uint64_t)read_byte : any_place());
	}
	if (other > 0)
		kill(other, SIGKILL);
	while (other > 0 && waitpid(other, NULL, 0) < 0 && errno == EINTR)
		;
}

static void expect_closed(void)
{
	uint64_t address = ANY(closed);
	if (mode != NONE && is_accessible(address + (below(PAGE) & -8), 0))
		violation(KERNEL_READ, address, 0);
}

// --- What is judged by its result.

static void expect_unmapped(void)
{
	uint64_t count = 1 + below(12);
	uint8_t *at = mmap(NULL, count * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (at == MAP_FAILED)
		return;
	for (uint64_t i = 0; i < count; i++)
		at[i * PAGE] = 1;
	if (one_in(2)) {
		if (mprotect(at, count * PAGE, PROT_READ) == 0 && is_accessible((uint64_t)at + below(count) * PAGE, 1))
			violation(RIGHTS, (uint64_t)at, 0);
	}
	if (munmap(at, count * PAGE))
		return;
	uint64_t page = (uint64_t)at + below(count) * PAGE;
	if (is_accessible(page, one_in(2)))
		violation(UNMAPPED, page, 0);
}

// Functions in pages that are mapped twice, in any order, and what each may give: what was written
// last, and with keys what was written before without a flush since.
#define SLOTS 4
#define OLD 8
struct slot {
	uint64_t now, old[OLD];
	int olds, is_number;
};
static struct slot model[PAGES][SLOTS];
static uint8_t shown[PAGES];

static void model_write(uint64_t page, uint64_t index)
{
	struct slot *slot = &model[page][index];
	uint64_t kind = below(4), offset = page * PAGE + 100 + index * 1000;
	uint64_t value = kind == 0 ? (uint64_t)getpid() : kind == 1 ? (uint64_t)getppid() : below(1 << 20);
	// An immediate that is an instruction which is not to be executed.
	static const volatile uint64_t sequence = 0xef010f;
	if (kind == 3 && one_in(8))
		value = sequence | below(64) << 24;
	used = 0;
	put_number(0xb8, 1);
	put_number(kind == 0 ? SYS_getpid : kind == 1 ? SYS_getppid : value, 4);
	put_hex(kind < 2 ? "0f 05 c3" : "90 90 c3");
	if (slot->olds < OLD)
		slot->old[slot->olds++] = slot->now;
	slot->now = value;
	slot->is_number = kind > 1;
	pid_t other = one_in(24) ? fork() : -1;
	if (other <= 0) {
		if (one_in(3))
			(void)!pwrite(file, code, used, offset);
		else
			memcpy((void *)(WRITABLE + offset), code, used);
	}
	if (other == 0)
		_exit(0);
	while (other > 0 && waitpid(other, NULL, 0) < 0 && errno == EINTR)
		;
}

static void model_call(uint64_t view, uint64_t index)
{
	struct slot *slot = &model[shown[view]][index];
	uint64_t (*function)(void) = (void *)(EXECUTABLE + view * PAGE + 100 + index * 1000);
	for (uint64_t times = one_in(4) ? 12 : 2; times != 0; times--) {
		uint64_t value = function();
		int is_right = value == slot->now;
		for (int i = 0; mode == KEYS && i < slot->olds; i++)
			is_right |= value == slot->old[i];
		// A copy in another process than that which has written it.
		is_right |= mode == KEYS && slot->olds && (value == (uint64_t)getpid() || value == (uint64_t)getppid());
		report->model_calls++;
		if (!is_right)
			violation(STALE, value, slot->now);
	}
}

static void model_flush(void)
{
	// All of it, and with another right.
	mprotect((void *)EXECUTABLE, PAGES * PAGE, PROT_READ);
	mprotect((void *)EXECUTABLE, PAGES * PAGE, PROT_READ | PROT_EXEC);
	for (int page = 0; page < PAGES; page++)
		for (int index = 0; index < SLOTS; index++)
			model[page][index].olds = 0;
}

static void judged(void)
{
	for (uint64_t page = 0; page < PAGES; page++) {
		shown[page] = page;
		for (uint64_t index = 0; index < SLOTS; index++) {
			model_write(page, index);
			model[page][index].olds = 0;
		}
	}
	for (step = 0; step < 4 * STEPS; step++) {
		uint64_t page = below(PAGES), index = below(SLOTS);
		switch (below(16)) {
		case 0: {
			uint64_t to = below(PAGES);
			void *at = (void *)(EXECUTABLE + page * PAGE);
			if (mmap(at, PAGE, PROT_READ | PROT_EXEC, MAP_SHARED | MAP_FIXED, file, to * PAGE) == at)
				shown[page] = to;
			break;
		}
		case 1: model_flush(); break;
		case 2: expect_unmapped(); break;
		case 3: case 4: case 5: model_write(page, index); break;
		case 6: {
			// Another process executes the same.
			pid_t other = fork();
			if (other == 0) {
				own_thread = syscall(SYS_gettid);
				for (uint64_t i = 0; i < PAGES * SLOTS; i++)
					if (model[shown[i / SLOTS]][i % SLOTS].is_number)
						model_call(i / SLOTS, i % SLOTS);
				_exit(0);
			}
			while (other > 0 && waitpid(other, NULL, 0) < 0 && errno == EINTR)
				;
			break;
		}
		default: model_call(page, index);
		}
	}
}

// --- Programs, what is beside them, and who starts them.

static void confine(uid_t user)
{
	const struct { int what; rlim_t limit; } limits[] = {
		{ RLIMIT_NPROC, 4 }, { RLIMIT_AS, 256 << 20 }, { RLIMIT_FSIZE, 1 << 20 }, { RLIMIT_CORE, 0 }, { RLIMIT_CPU, 4 }, { RLIMIT_MEMLOCK, 1 << 20 },
	};
	int none = open("/dev/null", O_RDWR);
	for (int number = 0; number < 3; number++)
		dup2(none, number);
	for (size_t i = 0; i < LENGTH(limits); i++)
		setrlimit(limits[i].what, &(struct rlimit){ limits[i].limit, limits[i].limit });
	setsid();
	if (setgid(user) || setuid(user))
		_exit(1);
	// It can be written at /proc/self/mem again, and ends with its worker.
	prctl(PR_SET_DUMPABLE, 1, 0, 0, 0);
	prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
}

static void prepare(void)
{
	static uint8_t stack[64 * 1024];
	static const int numbers[] = { SIGILL, SIGTRAP, SIGBUS, SIGFPE, SIGSEGV, SIGSYS, SIGALRM, SIGUSR2, SIGPIPE, SIGIO };
	stack_t other = { .ss_sp = stack, .ss_size = sizeof(stack) };
	sigaltstack(&other, NULL);
	for (size_t i = 0; i < LENGTH(numbers); i++) {
		struct sigaction action = { .sa_sigaction = on_signal, .sa_flags = SA_SIGINFO | SA_ONSTACK };
		sigfillset(&action.sa_mask);
		sigaction(numbers[i], &action, NULL);
	}
	sigset_t nothing;
	sigemptyset(&nothing);
	sigprocmask(SIG_SETMASK, &nothing, NULL);
}

static void live(uint64_t seed, uid_t user)
{
	program_seed = seed;
	state = seed * 0x2545f4914f6cdd1dul;
	confine(user);
	own_thread = syscall(SYS_gettid);
	asm volatile("rdfsbase %0" : "=r"(kept_fs));
	file = memfd_create("code", 0);
	memory_file = open("/proc/self/mem", O_RDWR);
	if (file < 0 || ftruncate(file, PAGES * PAGE))
		_exit(1);
	void *at = mmap((void *)EXECUTABLE, PAGES * PAGE, PROT_READ | PROT_EXEC, MAP_SHARED | MAP_FIXED_NOREPLACE, file, 0);
	if (at != (void *)EXECUTABLE)
		_exit(1);
	restore_mappings();
	memset((void *)WRITABLE, mode == NONE ? 0xc3 : 0xcc, PAGES * PAGE);
	memset((void *)BOTH, 0xc3, PAGES * PAGE);
	prepare();
	if (one_in(4)) {
		judged();
		_exit(0);
	}
	for (step = 0; step < STEPS; step++) {
		prepare();
		restore_mappings();
		switch (below(12)) {
		case 0: case 1: change_hot(); break;
		case 2: case 3: change_mappings(); break;
		case 4: forge_frame(); break;
		case 5: signal_itself(); break;
		case 6: change_elsewhere(); break;
		case 7: expect_closed(); break;
		case 8:
			for (int i = 0; i < 8; i++)
				expect_unmapped();
			break;
		default: execute_new();
		}
	}
	_exit(0);
}

static void pause_for(long microseconds)
{
	nanosleep(&(struct timespec){ 0, microseconds * 1000 }, NULL);
}

static int64_t now(void)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1000 + time.tv_nsec / 1000000;
}

// A program, and whatever it has left.
static void run_program(uint64_t seed, uid_t user)
{
	int status;
	pid_t program = fork(), killer;
	if (program == 0)
		live(seed, user);
	int64_t limit = now() + LIMIT;
	while (waitpid(program, &status, WNOHANG) == 0 && now() < limit && report->kind == 0)
		pause_for(2000);
	kill(program, SIGKILL);
	// Again, should one of them have made another one meanwhile.
	for (int round = 0, ended = 0; ended >= 0; round++) {
		if (round % 64 == 0 && (killer = fork()) == 0) {
			if (setuid(user) == 0)
				kill(-1, SIGKILL);
			_exit(0);
		}
		while ((ended = waitpid(-1, &status, WNOHANG)) > 0)
			;
		if (ended == 0)
			pause_for(1000);
	}
}

#define NEIGHBOUR_PAGES 64
static uint64_t pattern[4][PAGE / 8];

static void fill(uint64_t *memory, size_t words, uint64_t from)
{
	for (size_t i = 0; i < words; i++)
		memory[i] = (from + i) * 0x9e3779b97f4a7c15ul;
}

static int is_filled(const uint64_t *memory, size_t words, uint64_t from)
{
	for (size_t i = 0; i < words; i++)
		if (memory[i] != (from + i) * 0x9e3779b97f4a7c15ul)
			return 0;
	return 1;
}

// A process of another user, whose memory and registers must not change.
static void be_neighbour(uint64_t number)
{
	size_t words = NEIGHBOUR_PAGES * PAGE / 8;
	uint64_t *memory = mmap(NULL, words * 8, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED)
		exit(1);
	fill(memory, words, number);
	while (!report->is_over && report->kind == 0) {
		uint64_t low, high;
		asm volatile("movq %2, %%xmm5\n movq %3, %%xmm11\n mov %4, %%r14\n mov $5000, %%ecx\n1: pause\n dec %%ecx\n jnz 1b\n"
			     "movq %%xmm5, %0\n movq %%xmm11, %1\n add %%r14, %1"
			     : "=&r"(low), "=&r"(high) : "r"(number), "r"(~number), "r"(number + 1) : "rcx", "r14", "xmm5", "xmm11", "cc");
		if (low != number || high != 0)
			violation(REGISTERS, low, number);
		if (!is_filled(memory, words, number))
			violation(NEIGHBOUR, number, 0);
		pause_for(10000);
	}
	exit(0);
}

// A sum of the file of this program, which user mode has mapped.
static uint64_t sum_of_file(void)
{
	uint8_t bytes[PAGE];
	uint64_t sum = 0;
	int own = open("/proc/self/exe", O_RDONLY);
	for (ssize_t length; (length = read(own, bytes, sizeof(bytes))) > 0;)
		for (ssize_t i = 0; i < length; i++)
			sum = (sum ^ bytes[i]) * 0x100000001b3ul;
	close(own);
	return sum;
}

static void work(uint64_t worker, uint64_t workers, uint64_t seed, uint64_t count)
{
	prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
	fill(pattern[0], LENGTH(pattern) * PAGE / 8, seed);
	for (uint64_t i = worker; i < count && report->kind == 0; i += workers) {
		program_seed = seed + i;
		if (getenv("FUZZ_SAYS"))
			dprintf(1, "fuzz: program %lu\n", program_seed);
		run_program(program_seed, USER + worker);
		if (!is_filled(pattern[0], LENGTH(pattern) * PAGE / 8, seed))
			violation(OWN_MEMORY, 0, 0);
		if (has_keys && pkru() != USER_PKRU)
			violation(PKRU_BEHIND_CODE, pkru(), USER_PKRU);
	}
	exit(0);
}

int main(int arguments, char **argument)
{
	static const char *const modes[] = { "none", "process", "keys" };
	struct utsname before, after;
	if (arguments != 4) {
		fprintf(stderr, "usage: fuzz MODE SEED COUNT\n");
		return 64;
	}
	for (size_t i = 0; i < LENGTH(modes); i++)
		if (!strcmp(argument[1], modes[i]))
			mode = i;
	has_keys = mode == KEYS;
	uint64_t seed = strtoull(argument[2], NULL, 0), count = strtoull(argument[3], NULL, 0);
	uint64_t workers = sysconf(_SC_NPROCESSORS_ONLN), sum = sum_of_file();
	report = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (report == MAP_FAILED || uname(&before))
		return 1;
	pid_t neighbour = fork();
	if (neighbour == 0)
		be_neighbour(seed + 1);
	for (uint64_t worker = 1; worker < workers; worker++)
		if (fork() == 0)
			work(worker, workers, seed, count);
	pid_t last = fork();
	if (last == 0)
		work(0, workers, seed, count);
	for (uint64_t worker = 0; worker < workers; worker++) {
		pid_t ended = wait(NULL);
		// The neighbour has found something.
		if (ended == neighbour)
			worker--;
	}
	report->is_over = 1;
	while (wait(NULL) > 0)
		;
	printf("fuzz: %lu programs, %lu runs of code, %lu system calls made, %lu judged calls, %lu probes, %lu signals\n", count, report->runs,
	       report->system_calls, report->model_calls, report->probes, report->signals);
	uname(&after);
	if (report->kind != 0) {
		printf("fuzz: FAILED: seed %lu, step %lu: %s: %#lx, not %#lx\n", report->seed, report->step, kinds[report->kind % LENGTH(kinds)],
		       report->value, report->expected);
		return 1;
	}
	if (sum != sum_of_file() || memcmp(&before, &after, sizeof(before))) {
		printf("fuzz: FAILED: a file or a name of the kernel has changed\n");
		return 1;
	}
	printf("fuzz: all well with %s\n", modes[mode]);
	return 0;
}
