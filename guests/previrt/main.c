/* A kernel that does a little of everything that needs privilege. */

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long u64;

struct frame {
	u64 r15, r14, r13, r12, r11, r10, r9, r8, rbp, rdi, rsi, rdx, rcx, rbx, rax;
	u64 vector, error, rip, cs, rflags, rsp, ss;
};

struct gate {
	u16 low, selector, flags, middle;
	u32 high, zero;
};

extern u8 vectors[], stack_top[], parador_sites_1_start[], parador_sites_1_end[];
extern u64 table4[512], tss[];
extern struct { int place, fixup, unused; } fixups[], fixups_end[];
extern void syscall_entry(void), leave_user(void) __attribute__((noreturn));
extern int safe_rdmsr(u32 msr), safe_wrmsr(u32 msr, u32 value), safe_xsetbv(void);
extern void user(void (*program)(void), void *stack);

static inline void outb(u16 port, u8 value)
{
	asm volatile("outb %0, %1" : : "a"(value), "Nd"(port));
}

static inline u8 inb(u16 port)
{
	u8 value;

	asm volatile("inb %1, %0" : "=a"(value) : "Nd"(port));
	return value;
}

static inline u64 save_flags(void)
{
	u64 flags;

	asm volatile("pushf ; pop %0" : "=rm"(flags) : : "memory");
	return flags;
}

static inline void restore_flags(u64 flags)
{
	asm volatile("push %0\n\tpopf" : : "g"(flags) : "memory", "cc");
}

static inline void wrmsr(u32 msr, u64 value)
{
	asm volatile("wrmsr" : : "c"(msr), "a"((u32)value), "d"((u32)(value >> 32)));
}

static void print(const char *text)
{
	for (; *text; text++) {
		while (!(inb(0x3fd) & 0x20))
			;
		outb(0x3f8, *text);
	}
}

static void number(u64 value)
{
	char digits[20];
	int length = 0;

	do {
		digits[length++] = "0123456789abcdef"[value % 16];
		value /= 16;
	} while (value);
	while (length--) {
		char text[2] = { digits[length], 0 };

		print(text);
	}
}

static void say(const char *what, u64 value)
{
	print(what);
	print(" ");
	number(value);
	print("\n");
}

static void __attribute__((noreturn)) power_off(void)
{
	/* ACPI: PM1a control of QEMU's q35, SLP_EN in state S5. */
	asm volatile("cli; outw %0, %1" : : "a"((u16)0x2000), "d"((u16)0x604));
	for (;;)
		asm volatile("hlt");
}

static volatile u32 ticks;
static volatile u64 fault_address;
static u64 table3[512] __attribute__((aligned(4096))), table2[512] __attribute__((aligned(4096)));
static u8 user_stack[4096] __attribute__((aligned(16)));
static struct { u64 kernel_stack, user_stack; } cpu = { (u64)stack_top - 8192, 0 };

static void set_entry(u64 *entry, u64 value)
{
	asm volatile("movq %1, %0 # parador:pgtable" : "=m"(*entry) : "r"(value));
}

void trap(struct frame *frame)
{
	if (frame->vector == 0x20) {
		ticks++;
		outb(0x20, 0x20);
		return;
	}
	if (frame->vector == 14) {
		u64 address;

		asm volatile("mov %%cr2, %0" : "=r"(address));
		fault_address = address;
		set_entry(&table2[0], 0x87);
		asm volatile("invlpg (%0)" : : "r"(address) : "memory");
		return;
	}
	if (frame->vector == 0x80) {
		say("int 0x80 from ring", frame->cs & 3);
		frame->rax = frame->rdi + 1;
		return;
	}
	for (unsigned i = 0; &fixups[i] < fixups_end; i++) {
		/* Distances from the fields themselves. */
		if ((frame->vector == 6 || frame->vector == 13) && (u64)&fixups[i].place + fixups[i].place == frame->rip) {
			frame->rip = (u64)&fixups[i].fixup + fixups[i].fixup;
			return;
		}
	}
	say("unexpected vector", frame->vector);
	say("at", frame->rip);
	power_off();
}

u64 system_call(u64 argument, u64 call)
{
	if (call == 2) {
		asm volatile("swapgs");
		leave_user();
	}
	say("system call with", argument);
	return argument * 2;
}

static u64 call_kernel(u64 call, u64 argument)
{
	u64 result = call;

	asm volatile("syscall" : "+a"(result), "+D"(argument)
		     : : "rcx", "rdx", "rsi", "r8", "r9", "r10", "r11", "memory");
	return result;
}

static void program(void)
{
	u64 value = call_kernel(1, 0x21);

	asm volatile("int $0x80" : "=a"(value) : "D"(value));
	call_kernel(1, value);
	call_kernel(2, 0);
}

static void set_gates(void)
{
	static struct gate idt[256] __attribute__((aligned(16)));
	struct __attribute__((packed)) { u16 limit; u64 base; } pointer = { sizeof(idt) - 1, (u64)idt }, back;

	for (unsigned i = 0; i < 256; i++) {
		u64 entry = (u64)vectors + 16 * i;

		idt[i] = (struct gate){ entry, 8, i == 0x80 ? 0xee00 : 0x8e00, entry >> 16, entry >> 32, 0 };
	}
	asm volatile("lidt %0" : : "m"(pointer));
	asm volatile("sidt %0" : "=m"(back));
	say("limit of the IDT", back.limit);
}

static void start_timer(void)
{
	/* 8259A: vectors from 0x20, all but line 0 masked. 8254: 1193182 / 11932 = 100 Hz. */
	static const u16 script[][2] = {
		{ 0x20, 0x11 }, { 0xa0, 0x11 }, { 0x21, 0x20 }, { 0xa1, 0x28 }, { 0x21, 4 }, { 0xa1, 2 },
		{ 0x21, 1 }, { 0xa1, 1 }, { 0x21, 0xfe }, { 0xa1, 0xff }, { 0x43, 0x34 }, { 0x40, 0x9c }, { 0x40, 0x2e },
	};

	for (unsigned i = 0; i < sizeof(script) / sizeof(*script); i++)
		outb(script[i][0], script[i][1]);
}

int main(void)
{
	u64 flags, cr0, cr4;
	u32 eax = 1, ebx, ecx = 0, edx, selector;

	print("previrt\n");
	set_gates();
	asm volatile("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
	say("page-table flags of CPUID", edx >> 6 & 1);
	asm volatile("mov %%cr0, %0" : "=r"(cr0));
	asm volatile("mov %%cr4, %0\n\tmov %0, %%cr4" : "=r"(cr4));
	say("CR0", cr0);
	asm volatile("mov %%cs, %0" : "=r"(selector));
	say("CS", selector);
	asm volatile("str %0" : "=r"(selector));
	say("TR", selector);
	asm volatile("mov %0, %%dr7; .byte 0x0f, 0x21, 0xf8" : "=a"(flags) : "0"(0x400UL));
	say("DR7", flags);

	say("rdmsr of EFER fails", safe_rdmsr(0xc0000080));
	say("wrmsr of STAR fails", safe_wrmsr(0xc0000081, 0));
	say("xsetbv without OSXSAVE fails", safe_xsetbv());

	start_timer();
	flags = save_flags();
	while (ticks < 3)
		asm volatile("sti; hlt; cli" : : : "memory");
	restore_flags(flags);
	say("interrupts on", save_flags() >> 9 & 1);
	print("three ticks\n");

	/* 512 GiB: the handler maps the first 2 MiB there. */
	table3[0] = (u64)table2 + 7;
	set_entry(&table4[1], (u64)table3 + 7);
	*(volatile u64 *)0x8000001000UL;
	say("page fault at", fault_address);

	tss[0] = 0;
	*(u64 *)((u8 *)tss + 4) = (u64)stack_top - 4096;
	wrmsr(0xc0000081, (0x10UL | 3) << 48 | 8UL << 32);
	wrmsr(0xc0000082, (u64)syscall_entry);
	wrmsr(0xc0000084, 0x700);
	wrmsr(0xc0000102, 0);
	wrmsr(0xc0000101, (u64)&cpu);
	user(program, user_stack + sizeof(user_stack));
	print("back from user mode\n");
	say("sites are whole records", (parador_sites_1_end - parador_sites_1_start) % 8 == 0);
	print("off\n");
	power_off();
}
