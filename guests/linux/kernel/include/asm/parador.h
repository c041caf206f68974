/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Definitions for a kernel that runs in either half of the address space.
 *
 * Addresses of the kernel's layout are constants inside instructions. Each such instruction is
 * recorded in the section parador_consts_1, so that a loader which moves the kernel can change it;
 * at the address that the kernel was linked for it is an ordinary move of a constant. Records are
 * relative to their own address and valid in vmlinux and in modules alike.
 *
 *	s32 from the record to the constant, u8 its width (4: sign-extended, 8), u8 id, u16 0
 *
 * In the lower half the kernel's image, its modules and the fixmap are in one GiB from
 * __START_KERNEL_map, below the user's mappings. In the upper half that GiB is far from them, so
 * the same tests are right there.
 */
#ifndef _ASM_X86_PARADOR_H
#define _ASM_X86_PARADOR_H

/* Ids of the constants, part of the section's format, and their values in the upper half. */
#define PARADOR_ID_start_kernel_map	0
#define PARADOR_ID_modules_end		1
#define PARADOR_ID_fixaddr_top		2
#define PARADOR_ID_task_limit		3
#define PARADOR_ID_cpu_entry_area	4
#define PARADOR_start_kernel_map	0xffffffff80000000
#define PARADOR_modules_end		0xffffffffff000000
#define PARADOR_fixaddr_top		0xffffffffff7ff000
#define PARADOR_task_limit		0x00007ffffffff000
#define PARADOR_cpu_entry_area		0xfffffe0000000000

/* Size of the area that holds the image, modules and the fixmap. */
#define PARADOR_IMAGE_SPAN		0x40000000

/* Least address of a mapping in the lower half: the usual vm.mmap_min_addr of hosts. */
#define PARADOR_LEAST_USER		0x10000

#define __PARADOR_STR(x)		#x
#define PARADOR_STR(x)			__PARADOR_STR(x)

#if defined(LINKER_SCRIPT)

/* Area for the stubs of rewritten sites: executable, in reach of every jump. */
#define PARADOR_ARENA							\
	. = ALIGN(64);							\
	parador_arena = .;						\
	. += 96 * 1024;							\
	parador_arena_end = .;

/* The tables, and one counter for each kind of site for tools that count executions. */
#define PARADOR_TABLES							\
	parador_sites_1 : AT(ADDR(parador_sites_1) - LOAD_OFFSET) {	\
		*(parador_sites_1)					\
	}								\
	parador_consts_1 : AT(ADDR(parador_consts_1) - LOAD_OFFSET) {	\
		*(parador_consts_1)					\
	}								\
	. = ALIGN(64);							\
	.parador_counters : AT(ADDR(.parador_counters) - LOAD_OFFSET) {	\
		parador_counters = .;					\
		QUAD(0)							\
		. += 255 * 8;						\
		parador_counters_end = .;				\
	}

#elif defined(__ASSEMBLY__)

/* Records the constant at the end of the instruction before it. */
#define PARADOR_RECORD(n, width)					\
97713:	.pushsection parador_consts_1, "a", @progbits;			\
	.long	97713b - width - .;					\
	.byte	width, PARADOR_ID_##n, 0, 0;				\
	.popsection

/*
 * Jumps to `bad` if a user's address is in the image; else sets `scratch` to the end of the user's
 * part - n, for the check that follows.
 */
#define PARADOR_USER_LIMIT(n, scratch, address, bad)			\
	mov	address, scratch;					\
	subq	$PARADOR_start_kernel_map, scratch;			\
	PARADOR_RECORD(start_kernel_map, 4);				\
	cmpq	$PARADOR_IMAGE_SPAN, scratch;				\
	jb	bad;							\
	movabs	$(PARADOR_task_limit - (n)), scratch;			\
	PARADOR_RECORD(task_limit, 8)

#else /* C */

#define PARADOR_RECORD(n, width)					\
	"97713: .pushsection parador_consts_1, \"a\", @progbits\n\t"	\
	".long 97713b - " #width " - .\n\t"				\
	".byte " #width ", " PARADOR_STR(PARADOR_ID_##n) ", 0, 0\n\t"	\
	".popsection"

#if defined(__DISABLE_EXPORTS) || defined(_SETUP) || defined(BUILD_VDSO)
/* Parts that run before or beside the kernel; a loader does not move them with it. */
#define PARADOR_CONST(n)		(PARADOR_##n + 0UL)
#define PARADOR_CONST32(n)		(PARADOR_##n + 0UL)
#define parador_image_offset(address)	((unsigned long)(address) - PARADOR_CONST32(start_kernel_map))
#else
#define PARADOR_MOVE(insn, n, width) ({					\
	unsigned long __value;						\
	asm_inline(insn " %1, %0\n" PARADOR_RECORD(n, width)		\
	    : "=r" (__value) : "i" (PARADOR_##n + 0UL));		\
	__value;							\
})
#define PARADOR_CONST(n)		PARADOR_MOVE("movabs", n, 8)
#define PARADOR_CONST32(n)		PARADOR_MOVE("movq", n, 4)

/* Distance of an address from __START_KERNEL_map. */
#define parador_image_offset(address) ({				\
	unsigned long __offset = (unsigned long)(address);		\
	asm_inline("subq %1, %0\n" PARADOR_RECORD(start_kernel_map, 4)	\
	    : "+r" (__offset) : "i" (PARADOR_start_kernel_map + 0UL) : "cc"); \
	__offset;							\
})
#endif

#define parador_in_image(address) (parador_image_offset(address) < PARADOR_IMAGE_SPAN)

/* True if a range of user addresses overlaps the image; the range must not wrap around. */
#define parador_image_overlaps(address, length) ({			\
	unsigned long __start = PARADOR_CONST32(start_kernel_map);	\
	(address) < __start + PARADOR_IMAGE_SPAN && __start < (address) + (length); \
})

/*
 * True if user processes map nothing in a range: the image, and what hosts do not let ordinary
 * processes map. The range must not wrap around.
 */
#define parador_is_reserved(address, length)				\
	(parador_image_overlaps(address, length) ||			\
	 (parador_lower_half() && (address) < PARADOR_LEAST_USER))

/* An address, or the end of the image for addresses of the image. */
#define parador_beyond_image(address) ({				\
	unsigned long __address = (address);				\
	unsigned long __end = PARADOR_CONST32(start_kernel_map) + PARADOR_IMAGE_SPAN; \
	parador_in_image(__address) ? __end : __address;		\
})

/* True if an address of unknown origin is a user's. */
#define parador_is_user(address)					\
	((unsigned long)(address) < TASK_SIZE && !parador_in_image(address))

#define parador_lower_half() ((long)PARADOR_CONST32(start_kernel_map) > 0)

/*
 * Set in the lower half, for alternatives: user mode calls the kernel, since the CPU would return
 * the host's values. Linux does not use this bit.
 */
#define X86_FEATURE_PARADOR_CALLS	(8*32+31)

/*
 * Stores into page tables, one instruction each. The marker makes it a site; `lock` is explicit
 * because Linux may patch the prefix of its usual macro away, and a site is an entire instruction.
 */
#define PARADOR_PGTABLE		" # parador:pgtable"

#define parador_store(place, value) do {				\
	typeof(place) __entry = (value);				\
	_Static_assert(sizeof(__entry) == 8, "not an entry of a page table"); \
	asm volatile("movq %1, %0" PARADOR_PGTABLE			\
	    : "=m" (place) : "re" (*(unsigned long *)&__entry));	\
} while (0)

#define parador_exchange(place, value) ({				\
	typeof(*(place)) __entry = (value);				\
	_Static_assert(sizeof(__entry) == 8, "not an entry of a page table"); \
	asm volatile("xchgq %0, %1" PARADOR_PGTABLE			\
	    : "+r" (*(unsigned long *)&__entry), "+m" (*(place)) : : "memory"); \
	__entry;							\
})

/* The bit is one of the first eight. */
#define parador_clear_bit(bit, place)					\
	asm volatile("lock andb %1, %0" PARADOR_PGTABLE			\
	    : "+m" (*(unsigned char *)(place)) : "i" ((unsigned char)~(1 << (bit))) : "memory", "cc")

#define parador_test_and_clear_bit(bit, place) ({			\
	bool __was;							\
	asm volatile("lock btrq %2, %1" PARADOR_PGTABLE "\n\tsetc %0"	\
	    : "=q" (__was), "+m" (*(unsigned long *)(place)) : "i" (bit) : "memory", "cc"); \
	__was;								\
})

#define parador_copy_entries(to, from, count) do {			\
	void *__to = (to);						\
	const void *__from = (from);					\
	unsigned long __count = (count);				\
	asm volatile("rep movsq" PARADOR_PGTABLE			\
	    : "+D" (__to), "+S" (__from), "+c" (__count) : : "memory");	\
} while (0)

#endif /* C */
#endif
