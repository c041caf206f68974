// SPDX-License-Identifier: GPL-2.0-only
/*
 * A guest's kernel that means harm, in a hosted machine: it tries to reach the host from the
 * process that it is in. All of it comes from a seed.
 *
 *	insmod check_escape.ko what=WHAT seed=N rounds=M
 *
 *	calls	system calls of the host that its processes may make, with arguments at random
 *	call	one system call, number=N, arguments at random; what=int80 and what=x32: by the
 *		other ways in
 *	jumps	jumps to text=A,END of the wedge, from=I on: to every byte, one after the other in
 *		an order of their own, registers at random
 *	gate	the same to places=A,B,... and a few bytes behind each, with what belongs there
 *		(signal frames, numbers), forged
 *	memory	writes numbers, among them that of the process canary=N, to memory that the
 *		machine's processes share, and rings for them
 *	requests	has requests carried out that no driver has made, by the workers of
 *		queue=N, and counts how they end
 *	words	writes value=V to each word of that memory, from=I on, has a new process made
 *		meanwhile, and puts the word back
 *	takeover	the same for word=I alone; the new process executes code of this module,
 *		which sends a signal to the process canary=N
 *	mapper	has user processes replaced, and overwrites their code during set-up
 *	processes	has a process made for each slot of each virtual CPU, also of those that
 *		there are not
 *	affinity	asks for all CPUs: by memory of its own, by each set that the host has;
 *		then asks, by=N, for a change of those
 *	end	says that the machine has ended with code=N
 *	exit	ends the process with code=N
 *	fault	ends it by a fault that it cannot handle
 *	keys	writes PKRU
 *
 * Writes "escape: at I" to the host's standard error before each attempt that may be the last
 * one, and "escape: done" at the end. A jump ends at the next signal of the host, whose handler
 * (handler=A) is the module's meanwhile; what the wedge remembers is put back.
 */
#include <linux/module.h>
#include <linux/moduleparam.h>
#include <linux/printk.h>
#include <linux/sched.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <asm/asm.h>
#include <asm/fpu/api.h>
#include <asm/io.h>

/* Where everything is, generated from the host's sources (`tests/src/hosted/words.rs`). */
#include "check_layout.h"

static char *what = "calls";
module_param(what, charp, 0);
static unsigned long seed = 1, rounds = 1000, from, handler, number, canary, wild, queue, value_written, word = -1UL, code, by;
module_param(seed, ulong, 0);
module_param(rounds, ulong, 0);
module_param(from, ulong, 0);
module_param(handler, ulong, 0);
module_param(number, ulong, 0);
module_param(canary, ulong, 0);
module_param(wild, ulong, 0);
module_param(queue, ulong, 0);
module_param_named(value, value_written, ulong, 0);
module_param(word, ulong, 0);
module_param(code, ulong, 0);
module_param(by, ulong, 0);
static unsigned long text[2];
module_param_array(text, ulong, NULL, 0);
static unsigned long places[32];
static unsigned int places_count;
module_param_array(places, ulong, &places_count, 0);

/* Numbers and flags of the host. */
enum {
	NR_WRITE = 1, NR_MMAP = 9, NR_MPROTECT = 10, NR_MUNMAP = 11, NR_SIGRETURN = 15, NR_YIELD = 24, NR_SIGALTSTACK = 131, NR_FUTEX = 202, NR_RESTART = 219,
	NR_KILL = 62, NR_EXIT_GROUP = 231, NR_SETAFFINITY = 203, NR_SETTIME = 223, NR_GETTIME = 228, NR_FALLOCATE = 285, NR_GETRANDOM = 318, NR_PKEY_MPROTECT = 329,
	SHARED_FIXED = 0x11, OWN_FIXED = 0x32, POPULATE = 0x8000, READ_WRITE = 3, PUNCH_KEEP = 3,
};

/* Private memory of the process: data, and an area for mapping attempts. */
#define DATA		0x7a0000000000UL
#define DATA_LENGTH	0x40000UL
#define FIELD		0x7a1000000000UL
#define FIELD_LENGTH	0x1000000UL

static u64 state;

static u64 draw(void)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return state * 0x2545f4914f6cdd1dULL;
}

static u64 below(u64 limit)
{
	return (draw() >> 16) % limit;
}

static long host(unsigned long call, const unsigned long *arguments)
{
	register long r10 asm("r10") = arguments[3];
	register long r8 asm("r8") = arguments[4];
	register long r9 asm("r9") = arguments[5];
	long result;

	asm volatile("syscall"
		     : "=a" (result), "+r" (r10), "+r" (r8), "+r" (r9)
		     : "a" (call), "D" (arguments[0]), "S" (arguments[1]), "d" (arguments[2])
		     : "rcx", "r11", "memory");
	return result;
}

#define HOST(call, ...) host(call, (const unsigned long [6]){ __VA_ARGS__ })

static void say(const char *format, unsigned long value)
{
	char line[80];
	int length = scnprintf(line, sizeof(line), format, value);

	HOST(NR_WRITE, ERRORS_FD, (unsigned long)line, length);
}

/* An address of this process, more or less. */
static u64 address(void)
{
	static const u64 known[] = {
		0, 0x1000, 0x40000000, 0x50000000, WEDGE, WEDGE + 0x4000, SHARED, OWN_VCPU, STUBS, SHARED + QUEUES, SHARED + FILTERS, PRIVATE,
		PRIVATE + 0x20000, PRIVATE + 0x40000, 0x400000000000, 0x700000000000, 0x7fffffffe000, 0x800000000000, 0xffffffffff600000, -4096UL,
	};

	switch (below(4)) {
	case 0:
		return known[below(ARRAY_SIZE(known))] + below(4) * 8;
	case 1:
		return draw() >> (17 + below(32));
	default:
		return DATA + below(DATA_LENGTH - 64);
	}
}

/* Any value: small numbers and flags, descriptors, addresses, a process, bits. */
static u64 value(void)
{
	switch (below(8)) {
	case 0:
		return below(8);
	case 1:
		return below(1024);
	case 2:
		return 1UL << below(64);
	case 3:
		return -below(4096);
	case 4:
		return draw();
	case 5:
		return canary;
	default:
		return address();
	}
}

/* Where the host can write nothing, unless this kernel does not spare itself. */
static u64 nowhere(void)
{
	static const u64 known[] = { 0, 0x1000, 0x7b0000000000, 0x800000000000, 0xffffffffff600000, -4096UL };

	return wild ? address() : known[below(ARRAY_SIZE(known))];
}

static void set_up(void)
{
	unsigned long at;

	HOST(NR_MMAP, DATA, DATA_LENGTH, READ_WRITE | 4, OWN_FIXED, -1UL);
	for (at = DATA; at < DATA + DATA_LENGTH; at += 8)
		*(u64 *)at = 0;
}

/*
 * The host's timer, after some nanoseconds, and then each interval; 0: never. Gives what was left
 * of the time that was set before.
 */
static unsigned long set_timer(unsigned long nanoseconds, unsigned long interval)
{
	unsigned long *time = (unsigned long *)(DATA + DATA_LENGTH - 64);

	time[0] = 0;
	time[1] = interval;
	time[2] = nanoseconds / NSEC_PER_SEC;
	time[3] = nanoseconds % NSEC_PER_SEC;
	HOST(NR_SETTIME, 0, 0, (unsigned long)time, (unsigned long)time);
	return time[2] * NSEC_PER_SEC + time[3];
}

/*
 * Restores the timer: an expired one is due now, because the host drops its signal when the timer
 * is set again.
 */
static void set_back(unsigned long left)
{
	set_timer(left ? left : 1, 0);
}

/* Pages that mappings may change without harm to this kernel. */
static u64 field(u64 *length)
{
	*length = (below(64) + 1) << 12;
	if (below(16) == 0) {
		/* What lies there stays: no pages begin at odd addresses. */
		*length = below(4) ? 0 : below(0x1000);
		/* First address that a system call may not even name. */
		return address() % (CONFIG - (2UL << 32)) | 1;
	}
	return FIELD + (below(FIELD_LENGTH - *length) & ~0xfffUL) + (below(16) ? 0 : below(0x1000));
}

/* A call that the filter lets through. */
static void call_at_random(u64 own_page)
{
	static const unsigned long kinds[] = {
		NR_WRITE, NR_MMAP, NR_MMAP, NR_MPROTECT, NR_MUNMAP, NR_YIELD, NR_SIGALTSTACK, NR_FUTEX, NR_SETTIME, NR_FALLOCATE, NR_GETRANDOM, NR_PKEY_MPROTECT, NR_RESTART,
		NR_SETAFFINITY, NR_GETTIME,
	};
	u64 data = DATA + (below(DATA_LENGTH - 0x1000) & ~7UL), *words = (u64 *)data, length, at = field(&length), i;
	unsigned long stack[3];

	if (wild) {
		at = address();
		length = value();
	}
	for (i = 0; i < 16; i++)
		words[i] = value();
	switch (kinds[below(ARRAY_SIZE(kinds))]) {
	case NR_WRITE:
		/* The doorbell takes eight bytes; what it is rung with does not matter. */
		HOST(NR_WRITE, DOORBELL_FD, below(2) ? data : address(), below(2) ? 8 : below(64));
		break;
	case NR_MMAP:
		if (below(2))
			HOST(NR_MMAP, at, length, value() & 7, SHARED_FIXED | (below(4) ? 0 : POPULATE), MEMORY_FD, value() & (below(4) ? ~0xfffUL : ~0UL));
		else
			HOST(NR_MMAP, at, length, value(), OWN_FIXED, value(), value());
		break;
	case NR_MPROTECT:
		HOST(NR_MPROTECT, at, length, value(), value(), value(), value());
		break;
	case NR_PKEY_MPROTECT:
		HOST(NR_PKEY_MPROTECT, at, length, value(), below(4) ? -1UL : value());
		break;
	case NR_MUNMAP:
		HOST(NR_MUNMAP, at, length, value(), value());
		break;
	case NR_SIGALTSTACK:
		/*
		 * Without harm: as it is again, before a signal finds a stack that is none. No
		 * tick comes meanwhile, and a stack that is too small for a frame is one that the
		 * host refuses (below MINSIGSTKSZ, 2,048 bytes).
		 */
		i = set_timer(0, 0);
		HOST(NR_SIGALTSTACK, 0, (unsigned long)stack);
		words[0] = DATA, words[2] = below(2) ? DATA_LENGTH / 2 : below(wild ? 4096 : 2048);
		HOST(NR_SIGALTSTACK, below(4) ? data : nowhere(), below(2) ? data + 64 : nowhere());
		stack[1] &= ~1UL;
		HOST(NR_SIGALTSTACK, (unsigned long)stack);
		set_back(i);
		break;
	case NR_FUTEX:
		/* Waiting ends by a signal at the latest. */
		words[0] = 0, words[1] = below(1000000);
		HOST(NR_FUTEX, below(2) ? data + 16 : address(), below(2), value(), below(8) ? data : 0, address(), value());
		break;
	case NR_SETTIME:
		i = set_timer(0, 0);
		words[0] = below(2), words[1] = 1000000 + below(1000000), words[2] = below(2), words[3] = value();
		HOST(NR_SETTIME, below(2) ? 0 : value(), below(2), below(2) ? data : address(), below(2) ? data + 64 : nowhere());
		set_back(i);
		break;
	case NR_FALLOCATE:
		HOST(NR_FALLOCATE, MEMORY_FD, PUNCH_KEEP, below(2) ? own_page : -below(1UL << 40), below(2) ? 4096 : -below(4096));
		break;
	case NR_GETRANDOM:
		HOST(NR_GETRANDOM, below(8) ? data : 0x800000000000, below(512), value());
		break;
	case NR_SETAFFINITY:
		HOST(NR_SETAFFINITY, 0, CPU_SET_LENGTH, CPU_SETS + below(CPU_SET_CPUS + 1) * CPU_SET_LENGTH);
		break;
	case NR_GETTIME:
		/* CLOCK_PROCESS_CPUTIME_ID */
		HOST(NR_GETTIME, 2, below(2) ? data : nowhere());
		break;
	case NR_RESTART:
		HOST(NR_RESTART, value(), value(), value());
		break;
	default:
		HOST(NR_YIELD, value(), value(), value());
	}
}

static void calls(void)
{
	unsigned long page = __get_free_page(GFP_KERNEL), round;

	if (!page)
		return;
	for (round = 0; round < rounds; round++) {
		if (round % 256 == 0) {
			say("escape: at %lu\n", round);
			cond_resched();
		}
		call_at_random(virt_to_phys((void *)page));
	}
	HOST(NR_MUNMAP, FIELD, FIELD_LENGTH);
	free_page(page);
}

static void one_call(void)
{
	unsigned long arguments[6], i;
	long result;

	for (i = 0; i < 6; i++)
		arguments[i] = value();
	if (!strcmp(what, "int80"))
		asm volatile(".byte 0xcd, 0x80"
			     : "=a" (result)
			     : "a" (number), "b" (arguments[0]), "c" (arguments[1]), "d" (arguments[2]), "S" (arguments[3]), "D" (arguments[4])
			     : "r8", "r9", "r10", "r11", "memory");
	else
		result = host(!strcmp(what, "x32") ? number | 1UL << 30 : number, arguments);
	say("escape: the call returned %ld\n", result);
}

/*
 * escape_jump() goes to an address with registers of the caller's choice. It returns by the
 * landing, which the host calls as a signal handler. What it was in may have unmapped anything
 * that the wedge fills in, this module too, so all that is needed until the wedge's handler is
 * back lies where the wedge maps nothing, beside its own memory: the code of the landing at
 * first. Bytes are instructions that the kernel is not to have replaced.
 */
#define LANDING		0x76000000UL
#define JUMP		0x76001000UL
#define COPIES		0x76010000UL
#define LANDING_LENGTH	0x80000UL

/*
 * What the wedge remembers, and how much of it is put back: of the virtual CPU, of its stack, of
 * the process.
 */
static const struct { unsigned long start, length; } kept[] = {
	{ OWN_VCPU, 0x6000 }, { STUBS - 0x8000, 0x8000 }, { PRIVATE, 0x1c000 },
};

/* At JUMP; the assembler code below has the offsets. */
struct jump {
	u64 handler, old, new, stack, fs_base, gs_base, target, back;
	u64 registers[16];
	struct { u64 to, from, length; } kept[ARRAY_SIZE(kept)];
};

#define jump ((struct jump *)JUMP)

extern const u8 escape_landing[], escape_landing_end[], escape_back[];
int escape_jump(void);

asm(".pushsection .text\n"
    ".balign 512\n"
    "escape_jump:\n\t"
    "push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15\n\t"
    "mov %rsp, 0x76001018\n\t"
    "rdfsbase %rax; mov %rax, 0x76001020\n\t"
    "rdgsbase %rax; mov %rax, 0x76001028\n\t"
    "mov 0x76001000, %rdx; mov 0x76001010, %rax; mov %rax, (%rdx)\n\t"
    "mov 0x76001040, %rax; mov 0x76001048, %rcx; mov 0x76001050, %rdx; mov 0x76001058, %rbx\n\t"
    "mov 0x76001060, %rsp; mov 0x76001068, %rbp; mov 0x76001070, %rsi; mov 0x76001078, %rdi\n\t"
    "mov 0x76001080, %r8; mov 0x76001088, %r9; mov 0x76001090, %r10; mov 0x76001098, %r11\n\t"
    "mov 0x760010a0, %r12; mov 0x760010a8, %r13; mov 0x760010b0, %r14; mov 0x760010b8, %r15\n\t"
    ".byte 0xff, 0x24, 0x25; .long 0x76001030\n"	/* jmp *0x76001030 */
    "escape_back:\n\t"
    "pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp\n\t"
    ".byte 0xc3\n"
    "escape_landing:\n\t"
    ".byte 0x0f, 0x1f, 0x00\n\t"			/* nopl (%rax) */
    "movb $0, 0x74000000\n\t"				/* system calls are the host's */
    "mov 0x76001000, %rdx; mov 0x76001008, %rax; mov %rax, (%rdx)\n\t"
    "mov %edi, %ebx\n\t"
    "mov 0x760010c0, %rdi; mov 0x760010c8, %rsi; mov 0x760010d0, %rcx; rep movsb\n\t"
    "mov 0x760010d8, %rdi; mov 0x760010e0, %rsi; mov 0x760010e8, %rcx; rep movsb\n\t"
    "mov 0x760010f0, %rdi; mov 0x760010f8, %rsi; mov 0x76001100, %rcx; rep movsb\n\t"
    "mov 0x76001020, %rax; wrfsbase %rax\n\t"
    "mov 0x76001028, %rax; wrgsbase %rax\n\t"
    "mov 0x76001018, %rsp\n\t"
    "mov %ebx, %eax\n\t"
    ".byte 0xff, 0x24, 0x25; .long 0x76001038\n"	/* jmp *0x76001038 */
    "escape_landing_end:\n"
    ".popsection\n");

static bool prepare_jumps(void)
{
	u64 copy = COPIES;
	u32 distance = LANDING - (handler + 5);
	unsigned int i;

	if (HOST(NR_MMAP, LANDING, LANDING_LENGTH, READ_WRITE | 4, OWN_FIXED, -1UL) != LANDING ||
	    HOST(NR_MPROTECT, handler & ~0xfffUL, 0x1000, READ_WRITE | 4))
		return false;
	memset((void *)LANDING, 0, LANDING_LENGTH);
	memcpy((void *)LANDING, escape_landing, escape_landing_end - escape_landing);
	/* push $2; popf: which the kernel would replace, with what works in its place only. */
	memcpy((void *)LANDING, "\x6a\x02\x9d", 3);
	jump->handler = handler;
	jump->old = *(u64 *)handler;
	jump->new = (jump->old & ~0xffffffffffUL) | (u64)distance << 8 | 0xe9;
	jump->back = (u64)escape_back;
	for (i = 0; i < ARRAY_SIZE(kept); i++) {
		jump->kept[i].to = kept[i].start;
		jump->kept[i].from = copy;
		jump->kept[i].length = kept[i].length;
		copy += kept[i].length;
	}
	return true;
}

static void forge_stack(u64 *words, unsigned long count)
{
	unsigned long i;

	for (i = 0; i < count; i++)
		words[i] = below(4) ? value() : text[0] + below(text[1] - text[0]);
}

/*
 * A signal's frame as the host makes it, at words[1] and on: flags, link, stack, registers, rip,
 * flags, segments, ...
 */
static void forge_frame(u64 *words)
{
	unsigned long i;

	for (i = 0; i < 5 + 16; i++)
		words[1 + i] = value();
	words[1] = below(2) ? 7 : value();
	words[22] = below(2) ? text[0] + below(text[1] - text[0]) : value();
	words[23] = below(2) ? 0x202 : value();
	words[24] = below(4) ? 0x002b000000000033 : value();
	words[25] = value();
	words[26] = below(32);
	words[27] = below(2) ? 0 : value();
	words[28] = value();
	words[29] = below(4) ? 0 : value();
	for (i = 30; i < 64; i++)
		words[i] = below(2) ? 0 : value();
}

static void attempt(u64 target, bool forges)
{
	u64 *stack = (u64 *)(DATA + DATA_LENGTH / 2), altstack[3];
	unsigned long flags, i, left;

	HOST(NR_SIGALTSTACK, 0, (unsigned long)altstack);
	forge_stack(stack, 64);
	for (i = 0; i < 16; i++)
		jump->registers[i] = value();
	jump->registers[4] = below(4) ? (u64)stack : value();
	if (forges) {
		forge_frame(stack);
		/*
		 * As a handler of signals is called, as stubs and system calls come, as `SYSRET`
		 * goes.
		 */
		jump->registers[7] = below(4) ? below(66) : value();
		jump->registers[2] = below(4) ? (u64)(stack + 1) : value();
		if (below(2))
			jump->registers[0] = NR_SIGRETURN;
		if (below(2))
			jump->registers[1] = text[0] + below(text[1] - text[0]);
	}
	jump->target = target;
	local_irq_save(flags);
	left = set_timer(200000, 1000000);
	for (i = 0; i < ARRAY_SIZE(kept); i++)
		memcpy((void *)jump->kept[i].from, (void *)kept[i].start, kept[i].length);
	escape_jump();
	altstack[1] &= ~1UL;
	HOST(NR_SIGALTSTACK, (unsigned long)altstack);
	set_back(left);
	local_irq_restore(flags);
}

static void jumps(bool forges)
{
	/* A step that has no divisor in common with the length reaches everything. */
	const u64 step = 1000003;
	unsigned long round;

	if (!prepare_jumps())
		return;
	for (round = from; round < from + rounds; round++) {
		/* What an attempt does depends on nothing that was before it. */
		state = (seed * 0x9e3779b97f4a7c15ULL) ^ (round + 1) * 0xbf58476d1ce4e5b9ULL;
		draw();
		say("escape: at %lu\n", round);
		kernel_fpu_begin();
		if (forges)
			attempt(places[below(places_count)] + (below(2) ? 0 : below(16)), true);
		else
			attempt(text[0] + (seed + round * step) % (text[1] - text[0]), false);
		kernel_fpu_end();
		if (round % 32 == 0)
			cond_resched();
	}
}

/* Memory of this kernel that requests may name. */
static u8 *own;

static void *part_of(u64 request, unsigned int index, unsigned int offset)
{
	return (void *)(request + REQUEST_PARTS + index * PART_LENGTH + offset);
}

static u64 queue_at(u64 index)
{
	return SHARED + QUEUES + index * QUEUE_LENGTH;
}

static u64 request_at(u64 of, u64 id)
{
	return of + QUEUE_REQUESTS + id * REQUEST_LENGTH;
}

static void set_request(u64 request, u32 op, u32 used, u64 sector, u64 address, u32 length)
{
	WRITE_ONCE(*(u32 *)(request + REQUEST_OP), op);
	WRITE_ONCE(*(u32 *)(request + REQUEST_USED), used);
	WRITE_ONCE(*(u64 *)(request + REQUEST_SECTOR), sector);
	WRITE_ONCE(*(u32 *)(request + REQUEST_COUNT), 0);
	WRITE_ONCE(*(u64 *)part_of(request, 0, PART_ADDRESS), address);
	WRITE_ONCE(*(u32 *)part_of(request, 0, PART_BYTES), length);
}

static void give_request(u64 of, u64 id)
{
	__atomic_fetch_or((u64 *)(of + QUEUE_WAITING), 1UL << id, __ATOMIC_SEQ_CST);
	__atomic_fetch_add((u32 *)(of + QUEUE_CALLS), 1, __ATOMIC_SEQ_CST);
	HOST(NR_FUTEX, of + QUEUE_CALLS, 1, INT_MAX);
}

/* A request that no driver has made. */
static void forge_request(void)
{
	u64 of = queue_at(below(ALL_QUEUES)), id = below(REQUESTS), request = request_at(of, id), i;

	WRITE_ONCE(*(u32 *)(request + REQUEST_OP), below(9));
	WRITE_ONCE(*(u32 *)(request + REQUEST_USED), below(8) ? below(PARTS + 2) : value());
	WRITE_ONCE(*(u64 *)(request + REQUEST_SECTOR), below(2) ? below(1 << 20) : value());
	WRITE_ONCE(*(u32 *)(request + REQUEST_COUNT), below(2) ? below(256) : value());
	for (i = 0; i < PARTS; i++) {
		/* Most are unmapped addresses. */
		WRITE_ONCE(*(u64 *)part_of(request, i, PART_ADDRESS), below(16) ? 0xf0000000 + below(1 << 28) : value());
		WRITE_ONCE(*(u32 *)part_of(request, i, PART_BYTES), below(4) ? 512 : value());
	}
	/* One that is sound but for where it is. */
	if (below(4) == 0)
		set_request(request, OP_WRITE, 1, 0x30000 + (below(2) ? below(1 << 16) : value()), virt_to_phys(own), 4096);
	give_request(of, id);
}

/*
 * Every second request is sound, and leaves a mark in a sector of its own: what has been carried
 * out is to be seen in the disk's file. The others are not. Who serves a shared directory gets no
 * sectors, but messages without sense.
 */
#define NO_STATUS 0xff

static void requests(void)
{
	u64 of = queue_at(queue), sound = 0, done = 0, refused = 0, silent = 0, sector, n, spins;
	bool is_disk = queue < DISKS;

	own = kzalloc(8192, GFP_KERNEL);
	if (!own)
		return;
	for (n = 0; n < rounds; n++) {
		u64 id = n % REQUESTS, request = request_at(of, id), memory = virt_to_phys(own);
		u8 *status;

		sector = n / 2;
		*(u64 *)own = MARK + sector;
		if (!is_disk)
			set_request(request, OP_MESSAGE, 2, 0, memory, 64);
		else if (n % 2 == 0)
			set_request(request, OP_WRITE, 1, sector, memory, 512);
		else
			switch (below(6)) {
			case 0: set_request(request, OP_WRITE, 1, 1UL << 40, memory, 512); break;
			case 1: set_request(request, OP_WRITE, 1, -below(1 << 20), memory, 512); break;
			case 2:
				/*
				 * Of too many parts, those that there is room for are too long by
				 * a byte.
				 */
				set_request(request, OP_WRITE, PARTS + 1 + below(1 << 20), sector, memory, 512);
				WRITE_ONCE(*(u64 *)part_of(request, 1, PART_ADDRESS), memory);
				WRITE_ONCE(*(u32 *)part_of(request, 1, PART_BYTES), 1);
				break;
			case 3: set_request(request, OP_WRITE, 1, sector, 1UL << 40, 512); break;
			case 4: set_request(request, OP_WRITE, 1, sector, memory, 511); break;
			default: set_request(request, 100 + below(1 << 20), 1, sector, memory, 512);
			}
		sound += is_disk && n % 2 == 0;
		/* The wedge takes the bits of what is done; how it went stays. */
		status = (u8 *)(request + REQUEST_STATUS);
		WRITE_ONCE(*status, NO_STATUS);
		give_request(of, id);
		for (spins = 0; READ_ONCE(*status) == NO_STATUS && spins < 100000; spins++)
			HOST(NR_YIELD);
		if (*status == NO_STATUS)
			silent++;
		else if (*status == 0)
			done++;
		else
			refused++;
		if (n % 64 == 0)
			schedule_timeout_interruptible(1);
	}
	say("escape: sound requests %lu\n", sound);
	say("escape: requests carried out %lu\n", done);
	say("escape: requests refused %lu\n", refused);
	say("escape: requests unanswered %lu\n", silent);
	kfree(own);
}

static void bell(void)
{
	unsigned long one = 1;

	HOST(NR_WRITE, DOORBELL_FD, (unsigned long)&one, 8);
}

static void wait_a_moment(unsigned long turns)
{
	while (turns--)
		HOST(NR_YIELD);
}

/* Fills the word with value= repeatedly. put_back() restores its content. */
static u8 kept_bytes[64];

static u64 write_word(u64 index)
{
	u64 length = min_t(u64, words[index].length, sizeof(kept_bytes)), i;
	u8 *at = (u8 *)words[index].at;

	memcpy(kept_bytes, at, length);
	for (i = 0; i < length; i++)
		WRITE_ONCE(at[i], (u8)(value_written >> 8 * (i % 8)));
	return length;
}

static void put_back(u64 index)
{
	memcpy((void *)words[index].at, kept_bytes, min_t(u64, words[index].length, sizeof(kept_bytes)));
}

/* Asks for the process of a slot of this virtual CPU. */
static void want(u32 slot)
{
	WRITE_ONCE(*(u32 *)VCPU_WANTED, slot + 1);
	bell();
}

static void each_word(void)
{
	u64 index;

	for (index = from; index < ARRAY_SIZE(words); index++) {
		say("escape: at %lu\n", index);
		write_word(index);
		if (words[index].at != VCPU_WANTED)
			want(1 + index % 60);
		bell();
		wait_a_moment(300);
		put_back(index);
		bell();
		schedule_timeout_interruptible(1);
	}
}

/* Code, its stack, and what it says, in memory that is shared and can be executed. */
#define TAKEN_CODE	(STUBS + STUBS_LENGTH - 0x1000)
#define TAKEN_STACK	(STUBS + STUBS_LENGTH - 0x2000)
#define TAKEN_FLAG	((volatile u32 *)(STUBS + STUBS_LENGTH - 0x2800))

/* kill(canary, KICK_SIGNAL), its result behind the flag, the flag, then sched_yield() for ever. */
static u8 *write_kill(u8 *at)
{
	u64 flag = (u64)TAKEN_FLAG;

	*at++ = 0xb8; *(u32 *)at = NR_KILL; at += 4;
	*at++ = 0xbf; *(u32 *)at = canary; at += 4;
	*at++ = 0xbe; *(u32 *)at = KICK_SIGNAL; at += 4;
	*at++ = 0x0f; *at++ = 0x05;
	*at++ = 0x89; *at++ = 0x04; *at++ = 0x25; *(u32 *)at = flag + 4; at += 4;
	*at++ = 0xc7; *at++ = 0x04; *at++ = 0x25; *(u32 *)at = flag; at += 4; *(u32 *)at = 1; at += 4;
	*at++ = 0xb8; *(u32 *)at = NR_YIELD; at += 4;
	*at++ = 0x0f; *at++ = 0x05;
	*at++ = 0xeb; *at++ = 0xf7;
	return at;
}

/*
 * The device process looks once a second when it is not rung for, and it may be what the other
 * process waits for.
 */
static bool await_flag(unsigned long turns)
{
	while (!TAKEN_FLAG[0] && turns--) {
		if (turns % 4096 == 0)
			bell();
		HOST(NR_YIELD);
	}
	if (TAKEN_FLAG[0])
		say("escape: kill gives %lu\n", (long)(int)TAKEN_FLAG[1]);
	return TAKEN_FLAG[0];
}

static void takeover(void)
{
	const u32 slot = SLOTS / 4 - 2;
	volatile u32 *process = (u32 *)(SLOT_PROCESS + slot * SLOT_LENGTH), *turn = (u32 *)(SLOT_TURN + slot * SLOT_LENGTH);
	u64 *stack = (u64 *)TAKEN_STACK, old, i;

	TAKEN_FLAG[0] = TAKEN_FLAG[1] = 0;
	write_kill((u8 *)TAKEN_CODE);
	for (i = 0; i < 6; i++)
		stack[i] = 0;
	stack[6] = TAKEN_CODE;
	if (word < ARRAY_SIZE(words))
		write_word(word);
	want(slot);
	for (i = 0; !*process && i < 2000000; i++)
		HOST(NR_YIELD);
	wait_a_moment(1000);
	if (word < ARRAY_SIZE(words))
		put_back(word);
	say("escape: a new process %lu\n", *process);
	old = *(u64 *)VCPU_RSP;
	*(volatile u64 *)VCPU_RSP = TAKEN_STACK;
	++*turn;
	HOST(NR_FUTEX, (unsigned long)turn, 1, 1);
	await_flag(10000000);
	*(volatile u64 *)VCPU_RSP = old;
}

/*
 * The thread that maps for programs takes orders from this kernel. They are to map memory of the
 * guest, all of which is such code, over the code of the wedge, where the other thread is being
 * set up.
 */
static void mapper(void)
{
	const unsigned int order = 8;
	volatile u32 *batch = (u32 *)MAILBOX_REQUEST_BATCH, *used = (u32 *)MAILBOX_REQUEST_USED;
	volatile u64 *command = (u64 *)MAILBOX_REQUEST_COMMANDS;
	unsigned long memory = __get_free_pages(GFP_KERNEL, order), round, turns;
	u8 *page;

	if (!memory)
		return;
	/* Wherever the thread continues, it reaches the end of a page. */
	memset((void *)memory, 0x90, PAGE_SIZE << order);
	page = (u8 *)memory + (PAGE_SIZE << order) - PAGE_SIZE;
	write_kill(page + PAGE_SIZE - 64);
	TAKEN_FLAG[0] = TAKEN_FLAG[1] = 0;
	for (round = 0; round < rounds; round++) {
		if (round % 16 == 0)
			say("escape: at %lu\n", round);
		command[0] = NR_MMAP;
		command[1] = WEDGE;
		command[2] = min_t(u64, PAGE_SIZE << order, WEDGE_LENGTH);
		command[3] = 5;
		command[4] = SHARED_FIXED;
		command[5] = MEMORY_FD;
		command[6] = virt_to_phys((void *)memory);
		*used = 1;
		WRITE_ONCE(*(u32 *)VCPU_USER_WANTED, 1 + READ_ONCE(*(u32 *)VCPU_RUNNING));
		bell();
		for (turns = 0; turns < 20000; turns++) {
			++*batch;
			/* Message of the process when it is ready. */
			*(volatile u32 *)MAILBOX_RESPONSE_BATCH = 1;
			HOST(NR_FUTEX, MAILBOX_RESPONSE_BATCH, 1, 1);
			HOST(NR_FUTEX, (unsigned long)batch, 1, 1);
		}
		schedule_timeout_interruptible(1);
	}
}

static void processes(void)
{
	unsigned long slot, vcpu;

	for (slot = 0; slot < SLOTS; slot++) {
		for (vcpu = 0; vcpu < MAX_VCPUS; vcpu++) {
			u64 other = VCPUS + vcpu * VCPU_LENGTH - OWN_VCPU;

			WRITE_ONCE(*(u32 *)(VCPU_WANTED + other), slot + 1);
			WRITE_ONCE(*(u32 *)(VCPU_USER_WANTED + other), slot + 1);
		}
		bell();
		/* On a busy host each yield takes a time slice. */
		wait_a_moment(100);
		schedule_timeout_interruptible(1);
	}
	say("escape: asked for %lu processes\n", SLOTS * MAX_VCPUS);
	schedule_timeout_interruptible(3 * HZ);
}

static void affinity(void)
{
	u64 *own_set = (u64 *)DATA, set, given = 0;

	for (set = 0; set <= CPU_SET_CPUS; set++)
		given += HOST(NR_SETAFFINITY, 0, CPU_SET_LENGTH, CPU_SETS + set * CPU_SET_LENGTH) == 0;
	say("escape: sets of CPUs given %lu\n", given);
	schedule_timeout_interruptible(HZ);
	own_set[0] = -1UL;
	switch (by) {
	case 1:
		HOST(NR_MMAP, CPU_SETS, 0x1000, READ_WRITE, OWN_FIXED, -1UL);
		break;
	case 2:
		HOST(NR_MPROTECT, CPU_SETS, 0x1000, READ_WRITE);
		break;
	case 3:
		HOST(NR_MUNMAP, CPU_SETS - 0x1000, 0x2000);
		break;
	case 4:
		HOST(NR_MMAP, CONFIG, 0x1000, READ_WRITE, SHARED_FIXED, MEMORY_FD, 0);
		break;
	default:
		HOST(NR_SETAFFINITY, 0, CPU_SET_LENGTH, (unsigned long)own_set);
	}
	say("escape: the call returned %ld\n", 0);
}

static void memory(void)
{
	unsigned long round, at, one = 1;

	own = kzalloc(8192, GFP_KERNEL);
	if (!own)
		return;
	for (round = 0; round < rounds; round++) {
		if (round % 256 == 0)
			say("escape: at %lu\n", round);
		switch (below(wild ? 8 : 4)) {
		case 0:
			forge_request();
			break;
		case 1:
			at = queue_at(0) + below(ALL_QUEUES * QUEUE_LENGTH);
			break;
		case 2:
			at = SHARED + FILTERS + below(0x4000);
			break;
		case 3:
			/* The loader's record; disks and networks behind it. */
			at = SHARED + below(0x1000);
			break;
		case 4:
		case 5:
			at = SHARED + below(0x200000);
			break;
		default:
			at = SHARED + below(SHARED_LENGTH);
		}
		at &= ~7UL;
		if (at)
			WRITE_ONCE(*(u64 *)at, below(2) ? value() : canary | canary << 32);
		HOST(NR_WRITE, DOORBELL_FD, (unsigned long)&one, 8);
		if (round % 64 == 0)
			schedule_timeout_interruptible(1);
	}
	kfree(own);
}

static void keys(void)
{
	u32 faulted = 0;

	/* All rights, then none: who has no keys does not have the instruction. */
	asm volatile("1: .byte 0x0f, 0x01, 0xef\n2:\n" _ASM_EXTABLE_TYPE_REG(1b, 2b, EX_TYPE_IMM_REG | EX_DATA_IMM(1), %0)
		     : "+r" (faulted) : "a" (0), "c" (0), "d" (0) : "memory");
	say("escape: WRPKRU faults: %lu\n", faulted);
}

static int __init check_escape_init(void)
{
	state = seed * 0x9e3779b97f4a7c15ULL + 1;
	draw();
	set_up();
	if (!strcmp(what, "calls"))
		calls();
	else if (!strcmp(what, "jumps") || !strcmp(what, "gate"))
		jumps(what[0] == 'g');
	else if (!strcmp(what, "memory"))
		memory();
	else if (!strcmp(what, "requests"))
		requests();
	else if (!strcmp(what, "words"))
		each_word();
	else if (!strcmp(what, "takeover"))
		takeover();
	else if (!strcmp(what, "mapper"))
		mapper();
	else if (!strcmp(what, "processes"))
		processes();
	else if (!strcmp(what, "affinity"))
		affinity();
	else if (!strcmp(what, "end")) {
		WRITE_ONCE(*(u32 *)SHARED_ENDED, code + 1);
		bell();
		schedule_timeout_interruptible(10 * HZ);
	} else if (!strcmp(what, "exit"))
		HOST(NR_EXIT_GROUP, code);
	else if (!strcmp(what, "fault"))
		/* The code that would handle it is gone. */
		HOST(NR_MUNMAP, WEDGE, WEDGE_LENGTH);
	else if (!strcmp(what, "keys"))
		keys();
	else
		one_call();
	say("escape: done after %lu\n", rounds);
	return 0;
}
module_init(check_escape_init);

static void __exit check_escape_exit(void)
{
}
module_exit(check_escape_exit);

MODULE_DESCRIPTION("A guest's kernel that means harm");
MODULE_LICENSE("GPL");
