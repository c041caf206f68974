/* Marks that bench/plugin/count.c counts between; no-operations without that plugin. */
#ifndef MARK_H
#define MARK_H

#ifdef __x86_64__
#define MARK(number) __asm__ volatile(".byte 0x0f, 0x1f, 0x84, 0x00; .long 0x50617200 + %c0" : : "i"(number) : "memory")
#else
#define MARK(number) ((void)0)
#endif
#define START 1
#define END 2

#endif
