/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The kernel must not take its own image for a program's memory. The first address decides: whoever starts below the image
 * meets the 16 MiB before it first, where nothing is mapped (CONFIG_PHYSICAL_START).
 */
#ifndef _PARADOR_ACCESS_OK_H
#define _PARADOR_ACCESS_OK_H
#include_next <asm-generic/access_ok.h>

/* The vDSO of 32-bit programs is compiled with these headers, too. */
#ifdef CONFIG_64BIT
static __always_inline int parador_access_ok(const void __user *pointer, unsigned long size)
{
	return __access_ok(pointer, size) && !parador_in_image(pointer);
}
#define __access_ok parador_access_ok
#endif

#endif
