/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The test for the image's addresses is right in both halves: in the lower half the image may be
 * below the direct mapping.
 */
#ifndef _PARADOR_PAGE_64_H
#define _PARADOR_PAGE_64_H

#define __phys_addr_nodebug __phys_addr_upper_half
#include_next <asm/page_64.h>
#undef __phys_addr_nodebug

#ifndef __ASSEMBLY__
static __always_inline unsigned long __phys_addr_nodebug(unsigned long address)
{
	unsigned long offset = parador_image_offset(address);

	return offset < KERNEL_IMAGE_SIZE ? offset + phys_base : address - PAGE_OFFSET;
}
#endif

#endif
