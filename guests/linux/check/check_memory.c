// SPDX-License-Identifier: GPL-2.0-only
/*
 * Sums of the guest kernel's memory that does not change.
 *
 *	insmod check_memory.ko first=A,C last=B,D prints "memory: BYTES bytes, sum SUM" of the
 * ranges A to B and C to D
 */
#include <linux/module.h>
#include <linux/moduleparam.h>
#include <linux/printk.h>
#include <linux/types.h>

static ulong first[4], last[4];
static int firsts, lasts;
module_param_array(first, ulong, &firsts, 0);
module_param_array(last, ulong, &lasts, 0);

static int __init check_memory_init(void)
{
	u64 sum = 0, bytes = 0;
	int i;

	for (i = 0; i < firsts && i < lasts; i++) {
		const u64 *word = (const u64 *)first[i], *end = (const u64 *)last[i];

		for (; word < end; word++, bytes += sizeof(*word))
			sum = (sum ^ READ_ONCE(*word)) * 0x100000001b3ull;
	}
	pr_info("memory: %llu bytes, sum %016llx\n", bytes, sum);
	return 0;
}

static void __exit check_memory_exit(void)
{
}

module_init(check_memory_init);
module_exit(check_memory_exit);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("Sums of memory that does not change");
