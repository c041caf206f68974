// SPDX-License-Identifier: Apache-2.0
// A program that wants to reach its kernel, where both are in one process of a host (`parador
// run`): `attack` makes each attempt in a process of its own, and prints what came of them. With an
// argument the program is apart from its kernel, in another process, and tries what there is there.
// An attempt has failed if its process got a signal; it succeeds by changing the kernel's memory.
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 4096
#define BROKEN 66
// `proto::hosted::layout`, and what the wedge has there.
#define IMAGE 0x40000000ul
#define IMAGE_END 0x50000000ul
#define WEDGE 0x70000000ul
#define WEDGE_CODE_END 0x70100000ul
#define SHARED 0x71000000ul
#define CELL 0x71001000ul
#define STUBS 0x72000000ul
#define PRIVATE 0x74000000ul
#define CROSSING 0x74040000ul
#define SIGNAL_STACK 0x74020000ul
#define SIGNAL_STACK_END 0x74040000ul
#define SLOTS 0x74cd0000ul
#define CALL_STUBS 0x74ce0000ul
#define DIRECT 0x400000000000ul
#define WINDOW 0x700000000000ul
#define COPIES 0x740000000000ul
#define MAILBOX 0x77000000ul

// Registers by number, as instructions encode them.
struct registers {
	uint64_t gpr[16], target;
};
enum { RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI, R8 };
static struct registers at_jump __attribute__((used));
static uint64_t canary, safe_stack[1024] __attribute__((used));
static int attempts, harmless, apart;
// What they are about: registers for the gate.
static int variant;
// Every word of it leads on, wherever a `ret` takes one.
static uint64_t *returns;
static uint8_t area[PAGE] __attribute__((aligned(64)));

// Jumps with all registers of `at_jump`.
void jump(void);
// Landing of an attempt that succeeds, with the rights that it has gained.
void after(void);
asm("jump:\n"
    "	mov at_jump+0x08(%rip), %rcx\n	mov at_jump+0x10(%rip), %rdx\n	mov at_jump+0x18(%rip), %rbx\n"
    "	mov at_jump+0x20(%rip), %rsp\n	mov at_jump+0x28(%rip), %rbp\n	mov at_jump+0x30(%rip), %rsi\n"
    "	mov at_jump+0x38(%rip), %rdi\n	mov at_jump+0x40(%rip), %r8\n	mov at_jump+0x48(%rip), %r9\n"
    "	mov at_jump+0x50(%rip), %r10\n	mov at_jump+0x58(%rip), %r11\n	mov at_jump+0x60(%rip), %r12\n"
    "	mov at_jump+0x68(%rip), %r13\n	mov at_jump+0x70(%rip), %r14\n	mov at_jump+0x78(%rip), %r15\n"
    "	mov at_jump(%rip), %rax\n"
    "	jmp *at_jump+0x80(%rip)\n"
    "after:\n"
    "	lea safe_stack+8184(%rip), %rsp\n	and $-16, %rsp\n	cld\n	call change_kernel\n");

__attribute__((used, noreturn)) static void change_kernel(void)
{
	*(volatile char *)canary = 'Z';
	_exit(BROKEN);
}

typedef void attempt(uint64_t argument);

// Makes an attempt in a process of its own, which may last a second.
static void try(const char *name, attempt *what, uint64_t argument)
{
	int status;
	pid_t child = fork();
	if (child == 0) {
		// A second where others have a part of it.
		struct itimerval time = { .it_value = { .tv_sec = !apart, .tv_usec = apart ? 200000 : 0 } };
		setitimer(ITIMER_REAL, &time, NULL);
		what(argument);
		_exit(0);
	}
	waitpid(child, &status, 0);
	if (getenv("ATTACK_SAYS")) {
		printf("attack: %s %#lx: %#x\n", name, argument, status);
		fflush(stdout);
	}
	attempts++;
	if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
		harmless++;
	else if (WIFEXITED(status)) {
		printf("attack: %s %#lx SUCCEEDS (%d)\n", name, argument, WEXITSTATUS(status));
		fflush(stdout);
	}
}

static void reset(void)
{
	for (int i = 0; i < 16; i++)
		at_jump.gpr[i] = (uint64_t)area;
	at_jump.gpr[RSP] = (uint64_t)(returns + 512);
	// There, and not at the first access: see `main`.
	(void)*(volatile uint64_t *)(returns + 512);
	if (apart)
		return;
	// What the wedge takes back from there.
	uint64_t *crossing = (uint64_t *)CROSSING;
	uint64_t values[] = { SYS_getpid, (uint64_t)after, 0, (uint64_t)after, 0x33, 0x2, (uint64_t)(returns + 512), 0x2b };
	memcpy(crossing, values, sizeof values);
}

static void read_it(uint64_t address)
{
	(void)*(volatile uint64_t *)address;
	_exit(BROKEN);
}

static void write_it(uint64_t address)
{
	*(volatile uint64_t *)address = 0;
	_exit(BROKEN);
}

static void go(uint64_t address)
{
	reset();
	at_jump.target = address;
	jump();
}

static uint32_t rights;
// With registers as WRPKRU takes them.
static void open_at(uint64_t address)
{
	reset();
	at_jump.gpr[RAX] = rights;
	at_jump.gpr[RCX] = at_jump.gpr[RDX] = 0;
	at_jump.target = address;
	jump();
}

// The same in 32-bit code, whose stack is below 4 GiB.
static void open_in_32(uint64_t address)
{
	uint32_t *stack = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0);
	for (int i = 0; i < PAGE / 4; i++)
		stack[i] = IMAGE;
	asm volatile("mov %0, %%rsp\n pushq $0x23\n pushq %1\n xor %%eax, %%eax\n xor %%ecx, %%ecx\n xor %%edx, %%edx\n lretq"
		     :: "r"(stack + 512), "r"(address) : "memory");
}

// `area` says that PKRU is 0; only that is asked for.
static void restore_at(uint64_t address)
{
	reset();
	memset(area, 0, sizeof area);
	*(uint64_t *)(area + 512) = 1 << 9;
	*(uint32_t *)(area + 24) = 0x1f80;
	at_jump.gpr[RAX] = 0x200;
	at_jump.gpr[RDX] = 0;
	at_jump.target = address;
	jump();
}

// A frame that says that PKRU is 0, and the code that hands it to the host.
static void return_from_signal(uint64_t address)
{
	reset();
	memset(returns, 0, 4 * PAGE);
	uint64_t *context = returns + 512;
	context[5 + 15] = (uint64_t)(returns + 512);
	context[5 + 16] = (uint64_t)after;
	context[5 + 17] = 0x202;
	context[5 + 18] = 0x33 | 0x2bul << 48;
	context[5 + 23] = (uint64_t)area;
	memset(area, 0, sizeof area);
	*(uint64_t *)(area + 512) = 1 << 9;
	at_jump.gpr[RSP] = (uint64_t)context;
	at_jump.target = address;
	jump();
}

// A signal that never was: its number, where its context is, and the stack.
static uint64_t forged_number, forged_context, forged_stack, forged_vector, forged_rip;
static void forge_signal(uint64_t handler)
{
	reset();
	if (forged_context >= SIGNAL_STACK && forged_context < SIGNAL_STACK_END - PAGE) {
		uint64_t *context = (uint64_t *)forged_context;
		memset(context, 0, 1024);
		context[5 + 15] = (uint64_t)(returns + 512);
		context[5 + 16] = forged_rip;
		context[5 + 17] = 0x3002;
		context[5 + 19] = 0x1ff;
		context[5 + 20] = forged_vector;
		context[5 + 22] = canary;
		context[5 + 23] = (forged_context + 0x400) & ~63ul;
		memset((void *)context[5 + 23], 0xff, 1024);
		*(uint32_t *)(context[5 + 23] + 464) = 0x46505853;
	}
	at_jump.gpr[RDI] = forged_number;
	at_jump.gpr[RDX] = at_jump.gpr[R8] = forged_context;
	at_jump.gpr[RAX] = at_jump.gpr[RCX] = 0;
	at_jump.gpr[RSP] = forged_stack;
	at_jump.target = handler;
	jump();
}

// With this stack pointer the host gets a system call and a fault.
static void odd_stack(uint64_t pointer)
{
	asm volatile("mov %%rsp, %%rbx\n mov %0, %%rsp\n mov $39, %%eax\n syscall\n mov %%rbx, %%rsp\n"
		     "mov %0, %%rsp\n movq $0, 0\n" :: "r"(pointer) : "rax", "rbx", "rcx", "r11", "memory");
}

// None of it is to be in this program's own code: compilers put constants there.
static volatile uint8_t wrpkru[] = { 0x31, 0xc0, 0x31, 0xc9, 0x31, 0xd2, 0x0f, 0x01, 0xef, 0xc3 };
// mov eax, 0x200; xor edx, edx; xrstor [rdi]; ret
static volatile uint8_t xrstor[] = { 0xb8, 0, 2, 0, 0, 0x31, 0xd2, 0x48, 0x0f, 0xae, 0x2f, 0xc3 };
// mov eax, 0x200; mov rdx, rsi; xrstor [rdi]; ret: in no known form
static volatile uint8_t hidden[] = { 0xb8, 0, 2, 0, 0, 0x48, 0x89, 0xf2, 0x0f, 0xae, 0x2f, 0xc3 };
static volatile uint8_t ret[] = { 0xc3 };

__attribute__((noreturn)) static void run(void *code)
{
	memset(area, 0, sizeof area);
	*(uint64_t *)(area + 512) = 1 << 9;
	*(uint32_t *)(area + 24) = 0x1f80;
	((void (*)(void *, long))code)(area, 0);
	change_kernel();
}

static void put(uint8_t *to, const volatile uint8_t *bytes, size_t length)
{
	while (length--)
		*to++ = *bytes++;
}

#define PUT(to, bytes) put(to, bytes, sizeof bytes)

// Own code, by ways of writing it: 0 to 2 at once, 3 over a page border, 4 beside code that has
// run, 5 by another mapping, 6 by the kernel for a file, 7 by the kernel for memory, 8 where memory
// of the image shows it, 9 in the direct map, 10 the end of a page for another process, before a
// page that continues with it.
static void own_code(uint64_t way)
{
	int rwx = PROT_READ | PROT_WRITE | PROT_EXEC, rx = PROT_READ | PROT_EXEC;
	uint8_t *code = mmap(NULL, 2 * PAGE, rwx, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	int file = memfd_create("code", 0);
	switch (way) {
	case 0: PUT(code, wrpkru); run(code);
	case 1: PUT(code, xrstor); run(code);
	case 2: PUT(code, hidden); run(code);
	case 3:
		for (int split = 1; split < 3; split++) {
			uint8_t *at = code + PAGE - 6 - split;
			code[2 * PAGE - 1] = 0xc3;
			((void (*)(void))(code + 2 * PAGE - 1))();
			PUT(at, wrpkru);
			if (fork() == 0)
				run(at);
			wait(NULL);
		}
		return;
	case 4:
		PUT(code, ret);
		((void (*)(void))code)();
		PUT(code, wrpkru);
		run(code);
	case 5: case 6: {
		if (ftruncate(file, PAGE))
			return;
		uint8_t *other = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
		PUT(other, ret);
		code = mmap(NULL, PAGE, rx, MAP_SHARED, file, 0);
		((void (*)(void))code)();
		if (way == 5)
			PUT(other, wrpkru);
		else if (pwrite(file, (void *)wrpkru, sizeof wrpkru, 0) < 0)
			return;
		run(code);
	}
	case 7: {
		PUT(code, ret);
		mprotect(code, PAGE, rx);
		((void (*)(void))code)();
		int memory = open("/proc/self/mem", O_RDWR);
		if (pwrite(memory, (void *)wrpkru, sizeof wrpkru, (off_t)code) < 0)
			return;
		run(code);
	}
	case 8: case 9: {
		uint64_t entry = 0;
		PUT(code, wrpkru);
		int map = open("/proc/self/pagemap", O_RDONLY);
		if (pread(map, &entry, 8, (uint64_t)code / PAGE * 8) != 8)
			return;
		uint64_t frame = (entry & 0x7fffffffffffff) * PAGE;
		if (frame == 0)
			_exit(BROKEN);
		run((void *)((way == 8 ? IMAGE : DIRECT) + frame));
	}
	case 10: {
		if (ftruncate(file, 2 * PAGE))
			return;
		uint8_t *other = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
		uint8_t *at = other + PAGE - 7;
		// Without the first byte of WRPKRU: `ret` instead.
		PUT(at, wrpkru);
		at[6] = ret[0];
		other[PAGE + 64] = ret[0];
		code = mmap(NULL, 2 * PAGE, rx, MAP_SHARED, file, 0);
		((void (*)(void))(code + PAGE - 7))();
		((void (*)(void))(code + PAGE + 64))();
		if (fork() == 0) {
			other[0] = ret[0];
			at[6] = wrpkru[6];
			code = mmap(NULL, PAGE, rx, MAP_SHARED, file, 0);
			((void (*)(void))code)();
			_exit(0);
		}
		wait(NULL);
		run(code + PAGE - 7);
	}
	}
}

// The wedge does the `xrstor` of a page that is executed step by step.
static void restore_from(uint64_t address)
{
	uint8_t *code = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	PUT(code, hidden);
	mprotect(code, PAGE, PROT_READ | PROT_EXEC);
	((void (*)(uint64_t, long))code)(address & ~63ul, 0);
	_exit(BROKEN);
}

// Instructions behind which a processor does another one before it traps, or may do so.
static void two_at_once(uint64_t which)
{
	static volatile uint8_t clear[] = { 0x31, 0xc0, 0x31, 0xc9, 0x31, 0xd2 };
	static volatile uint8_t load_stack[] = { 0x8c, 0xd3, 0x8e, 0xd3, 0x0f, 0x01, 0xef, 0xc3 };
	static volatile uint8_t pop_flags[] = { 0x6a, 0x02, 0x9d, 0x0f, 0x01, 0xef, 0xc3 };
	static volatile uint8_t transaction[] = { 0xc7, 0xf8, 0, 0, 0, 0, 0x0f, 0x01, 0xef, 0xc3 };
	static volatile uint8_t prefixed[] = { 0x3e, 0x48, 0x0f, 0x01, 0xef, 0xc3 };
	static const struct { volatile uint8_t *bytes; size_t length; } all[] = {
		{ load_stack, sizeof load_stack }, { pop_flags, sizeof pop_flags },
		{ transaction, sizeof transaction }, { prefixed, sizeof prefixed },
	};
	uint8_t *code = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	PUT(code, clear);
	put(code + sizeof clear, all[which].bytes, all[which].length);
	mprotect(code, PAGE, PROT_READ | PROT_EXEC);
	run(code);
}

// Code with a sequence in an instruction works, with all that flags show of it.
static void step(void)
{
	// mov eax, 0x00ef010f; mov ecx, 3; pushfq; pop rdx; dec ecx; jnz back; and edx, 0x100;
	// add eax,
	// edx; ret
	static volatile uint8_t steps[] = { 0xb8, 0x0f, 0x01, 0xef, 0x00, 0xb9, 3, 0, 0, 0, 0x9c, 0x5a, 0xff, 0xc9, 0x75, 0xfa,
					    0x81, 0xe2, 0, 1, 0, 0, 0x01, 0xd0, 0xc3 };
	uint8_t *code = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	// Not in this program's own code, whose loops would be done step by step.
	static volatile int expected = 0xef010f;
	uint8_t *places[] = { code, code + PAGE - 3, code + PAGE - 12 };
	for (int i = 0; i < 3; i++) {
		mprotect(code, 2 * PAGE, PROT_READ | PROT_WRITE);
		memset(code, 0x90, 2 * PAGE);
		PUT(places[i], steps);
		mprotect(code, 2 * PAGE, PROT_READ | PROT_EXEC);
		int result = ((int (*)(void))places[i])();
		if (result != expected) {
			printf("attack: code with a sequence inside gives %#x, BUG:\n", result);
			exit(1);
		}
	}
}

// A number of a system call, and an address, that would make an instruction in the code that is
// made for calls.
static void odd_calls(uint64_t unused)
{
	// mov eax, 0x00ef010f; syscall; ret
	static volatile uint8_t call[] = { 0xb8, 0x0f, 0x01, 0xef, 0x00, 0x0f, 0x05, 0xc3 };
	static volatile uint8_t plain[] = { 0xb8, 0x27, 0, 0, 0, 0x0f, 0x05, 0xc3 };
	// Not in this program's own code.
	static volatile uint64_t place = 0x2aef010f1000;
	uint8_t *code = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	uint8_t *odd = mmap((void *)place, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
	(void)unused;
	PUT(code + 256, call);
	PUT(odd + 256, plain);
	mprotect(code, PAGE, PROT_READ | PROT_EXEC);
	mprotect(odd, PAGE, PROT_READ | PROT_EXEC);
	for (int i = 0; i < 16; i++) {
		((void (*)(void))(code + 256))();
		((void (*)(void))(odd + 256))();
	}
	for (uint64_t stub = CALL_STUBS; stub < CALL_STUBS + 16 * 32; stub++)
		if (fork() == 0) {
			rights = 0;
			open_at(stub);
		}
	while (wait(NULL) > 0)
		;
}

// A system call with RFLAGS.IF clear, then a loop: the alarm must arrive.
static void no_interrupts(uint64_t gate)
{
	static volatile uint8_t loop[] = { 0xeb, 0xfe };
	uint8_t *code = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	PUT(code, loop);
	mprotect(code, PAGE, PROT_READ | PROT_EXEC);
	reset();
	((uint64_t *)CROSSING)[1] = (uint64_t)code;
	((uint64_t *)CROSSING)[5] = 0x3002;
	at_jump.gpr[RAX] = at_jump.gpr[RCX] = at_jump.gpr[RDX] = 0;
	at_jump.target = gate;
	jump();
}

// The gate by which a program's process stops, from one of its instructions on: with registers by
// which it would map the guest's memory, wait for its orders with a time, or return to what is
// forged.
static void enter_gate(uint64_t at)
{
	static const uint64_t time[2] = { 0, 1000000 };
	uint64_t calls[][7] = {
		{ SYS_mmap, (uint64_t)area & ~4095ul, PAGE, 7, 0x11, 3, 0x1000000 },
		{ SYS_mprotect, MAILBOX, PAGE, 3 },
		{ SYS_futex, MAILBOX, 0, *(volatile uint32_t *)MAILBOX, (uint64_t)time },
		{ SYS_futex, MAILBOX, 0, *(volatile uint32_t *)MAILBOX },
		{ SYS_exit_group, 0 },
	};
	uint64_t *call = calls[variant % 5];
	return_from_signal(0);
	at_jump.gpr[RAX] = call[0];
	at_jump.gpr[RDI] = call[1];
	at_jump.gpr[RSI] = call[2];
	at_jump.gpr[RDX] = call[3];
	at_jump.gpr[R8 + 2] = call[4];
	at_jump.gpr[R8] = call[5];
	at_jump.gpr[R8 + 1] = call[6];
	at_jump.gpr[R8 + 4] = variant;
	at_jump.target = at;
	jump();
}

// Reports a stop without stopping: a VMM that trusts the report would wait forever.
static void lie(uint64_t reports)
{
	for (;;)
		for (int word = 0; word < 16; word++)
			*(volatile uint32_t *)(reports + word % 2 * 4) = *(volatile uint32_t *)(MAILBOX + word % 3 * 4);
}

// A page that it has given up, after a lie.
static void stale_page(uint64_t reports)
{
	volatile uint64_t *page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	*page = 1;
	*(volatile uint32_t *)reports = *(volatile uint32_t *)MAILBOX;
	munmap((void *)page, PAGE);
	*page = 2;
	_exit(BROKEN);
}

static void attack_gate(void)
{
	uint64_t gate = 0, reports = 0;
	const uint8_t *code = (const uint8_t *)WEDGE;
	// mov [number], edi, which is the gate's first instruction.
	for (uint64_t at = 0; at < WEDGE_CODE_END - WEDGE && !gate; at++) {
		uint32_t number;
		memcpy(&number, code + at + 3, sizeof number);
		if (!memcmp(code + at, "\x89\x3c\x25", 3) && number - MAILBOX < 0x10000) {
			gate = WEDGE + at;
			reports = number & ~4095ul;
		}
	}
	if (!gate) {
		printf("attack: no gate: nothing is apart\n");
		exit(1);
	}
	try("write orders", write_it, MAILBOX);
	try("write commands", write_it, MAILBOX + 0x200);
	for (uint64_t at = gate; at < gate + 0x180; at++) {
		try("gate", enter_gate, at);
		variant++;
	}
	// Each system call of the host, with all registers.
	for (uint64_t at = gate; at < gate + 0x180; at++)
		if (*(const uint16_t *)at == 0x050f || *(const uint16_t *)at == 0x80cd)
			for (int i = 0; i < 5; i++) {
				variant = i;
				try("call of the gate", enter_gate, at);
			}
	try("lie", lie, reports);
	try("stale page", stale_page, reports);
}

static uint64_t symbol(const char *name)
{
	char line[256], found[200], kind;
	uint64_t address, result = 0;
	FILE *file = fopen("/proc/kallsyms", "r");
	while (file && fgets(line, sizeof line, file))
		if (sscanf(line, "%lx %c %199s", &address, &kind, found) == 3 && !strcmp(found, name))
			result = address;
	if (!result) {
		printf("attack: no symbol %s\n", name);
		exit(1);
	}
	fclose(file);
	return result;
}

int main(int arguments, char **argument)
{
	struct utsname before, now;
	(void)argument;
	apart = arguments > 1;
	uname(&before);
	// `nodename` of the first name space.
	canary = symbol("init_uts_ns") + sizeof before.sysname;
	uint64_t restores = symbol("restore_fpregs_from_fpstate");
	step();
	// QEMU 7.2 does far returns of programs with the rights of a kernel, and those with
	// operands of 32
	// bits with half of the stack pointer: if no memory is there, that is the end of the
	// emulated
	// host.
	returns = mmap((void *)0x90000000, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
	if (returns == MAP_FAILED) {
		perror("attack: no memory below 4 GiB");
		return 1;
	}
	for (int i = 0; i < 4 * PAGE / 8; i++)
		returns[i] = (uint64_t)after;

	const uint64_t closed[] = { canary & ~7ul, IMAGE + 0x1000000, DIRECT + 0x1000000, WINDOW + 0x1000000, COPIES, SHARED, CELL,
				    SHARED + 0x4000, STUBS, PRIVATE + PAGE, CALL_STUBS };
	for (size_t i = 0; i < sizeof closed / 8; i++) {
		try("read", read_it, closed[i]);
		try("write", write_it, closed[i]);
	}
	try("write", write_it, PRIVATE);
	try("write", write_it, SLOTS);
	try("write", write_it, WEDGE);
	if (apart)
		attack_gate();

	const uint32_t all_rights[] = { 0, 0xffffffec, 0x55555554, 0x8, 0x3 };
	const uint8_t *code = (const uint8_t *)WEDGE;
	uint64_t handler = 0, gate = 0;
	for (uint64_t at = 0; at < WEDGE_CODE_END - WEDGE; at++) {
		// As far as it is mapped, which the host says.
		if (at % PAGE == 0) {
			int status;
			pid_t child = fork();
			if (child == 0) {
				(void)*(volatile const uint8_t *)(code + at);
				_exit(0);
			}
			waitpid(child, &status, 0);
			if (!WIFEXITED(status))
				break;
		}
		// QEMU 7.2 does far returns of programs with the rights of a kernel.
		if (at % 8191 == 0 && at % PAGE < PAGE - 64 && !memchr(code + at, 0xcf, 64) && !memchr(code + at, 0xcb, 64) &&
		    !memchr(code + at, 0xca, 64))
			try("jump", go, WEDGE + at);
		if (code[at] != 0x0f)
			continue;
		if (code[at + 1] == 0x01 && code[at + 2] == 0xef) {
			for (size_t i = 0; i < sizeof all_rights / 4; i++) {
				rights = all_rights[i];
				try("wrpkru", open_at, WEDGE + at);
			}
			try("wrpkru in 32-bit code", open_in_32, WEDGE + at);
			if (!memcmp(code + at - 9, "\x49\x89\xd0", 3))
				handler = WEDGE + at - 9;
			else if (code[at + 3] == 0x85)
				gate = WEDGE + at;
		}
		if (code[at + 1] == 0xae && (code[at + 2] & 0x38) == 0x28 && code[at + 2] < 0xc0) {
			try("xrstor", restore_at, WEDGE + at);
			try("xrstor", restore_at, WEDGE + at - 1);
		}
		if (code[at + 1] == 0x05 && !memcmp(code + at - 5, "\xb8\x0f\0\0", 4))
			try("sigreturn", return_from_signal, WEDGE + at - 5);
	}
	if (!apart && (!handler || !gate)) {
		printf("attack: no handler or no gate: nothing is protected\n");
		return 1;
	}
	for (uint64_t at = restores + 40; at < restores + 72; at++)
		try("xrstor of the kernel", restore_at, at);

	if (apart)
		goto end;
	const uint64_t contexts[] = { SIGNAL_STACK + 0x10000, SIGNAL_STACK_END - 8, CELL, DIRECT + 0x1000000, 0, SIGNAL_STACK + 1 };
	const uint64_t stacks[] = { CELL + 0x800, DIRECT + 0x1000000, SIGNAL_STACK + 0x8000 };
	const uint64_t rips[] = { (uint64_t)after, WEDGE + 0x400, handler, handler + 3, gate, IMAGE + 0x1000000, STUBS + 8, 1ul << 63 };
	const uint64_t numbers[] = { 4, 5, 7, 8, 11, 31, 12, 35, 9 };
	for (size_t n = 0; n < sizeof numbers / 8; n++)
		for (size_t i = n % 2; i < 8; i += 2) {
			forged_number = numbers[n];
			forged_context = contexts[n < 4 ? i % 6 : 0];
			forged_stack = stacks[i % 3];
			forged_rip = rips[i];
			forged_vector = n % 2 ? 14 : i;
			try("forged signal", forge_signal, n % 4 < 2 ? handler : handler + 3);
		}
	const uint64_t pointers[] = { SIGNAL_STACK + 8, SIGNAL_STACK + 0x100, SIGNAL_STACK_END - 16, CELL + 0x800, DIRECT + 0x1000000, 8 };
	for (size_t i = 0; i < sizeof pointers / 8; i++)
		try("stack", odd_stack, pointers[i]);
	for (uint64_t way = 0; way < 11; way++)
		try("own code", own_code, way);
	for (uint64_t which = 0; which < 4; which++)
		try("two at once", two_at_once, which);
	const uint64_t areas[] = { canary, IMAGE + 0x1000000, IMAGE + 0x3000000, DIRECT + 0x1000, DIRECT + 0x8000000, WINDOW + 0x8000000, CELL };
	for (size_t i = 0; i < sizeof areas / 8; i++)
		try("xrstor from closed memory", restore_from, areas[i]);
	try("odd calls", odd_calls, 0);
	try("no interrupts", no_interrupts, gate);

end:
	uname(&now);
	int same = !memcmp(&before, &now, sizeof now);
	printf("attack: %d attempts, %d without an effect; the kernel is %s\n", attempts, harmless, same ? "unchanged" : "CHANGED");
	return !same;
}
