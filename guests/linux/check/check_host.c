// SPDX-License-Identifier: GPL-2.0-only
/*
 * Asks the host of a hosted machine: a system call from the guest kernel, which the guest does
 * not treat as its own.
 *
 *	insmod check_host.ko call=N first=A fourth=B fifth=C prints "host: call N gives RESULT" if
 * it returns
 */
#include <linux/module.h>
#include <linux/moduleparam.h>
#include <linux/printk.h>

static long call, first, fourth, fifth;
module_param(call, long, 0);
module_param(first, long, 0);
module_param(fourth, long, 0);
module_param(fifth, long, 0);

static int __init check_host_init(void)
{
	register long r10 asm("r10") = fourth;
	register long r8 asm("r8") = fifth;
	register long r9 asm("r9") = 0;
	long result;

	asm volatile("syscall"
		     : "=a" (result)
		     : "a" (call), "D" (first), "S" (0), "d" (0), "r" (r10), "r" (r8), "r" (r9)
		     : "rcx", "r11", "memory");
	pr_info("host: call %ld gives %ld\n", call, result);
	return 0;
}

static void __exit check_host_exit(void)
{
}

module_init(check_host_init);
module_exit(check_host_exit);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("Asks the host of a hosted machine");
