/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The kernel must not treat its own image as user memory. The first address decides: an access that
 * starts below the image first reaches the unmapped 16 MiB before it (CONFIG_PHYSICAL_START).
 */
#ifndef _PARADOR_ACCESS_OK_H
#define _PARADOR_ACCESS_OK_H
#include_next <asm-generic/access_ok.h>

/* The vDSO of 32-bit processes is compiled with these headers, too. */
#ifdef CONFIG_64BIT
static __always_inline int parador_access_ok(const void __user *pointer, unsigned long size)
{
	return __access_ok(pointer, size) && !parador_in_image(pointer);
}
#define __access_ok parador_access_ok
#endif

#endif
