/* A QEMU plugin that counts executed instructions, and VM entries (VMRUN) among them.
 *
 * A program marks a point with a no-operation that is used for nothing else: NOPL with the
 * displacement MARK + n, 0 <= n < 256. Each execution, in any guest, writes a line
 * `n instructions entries` to the file that the argument `to=` names. Neither number includes time
 * in which the machine sleeps. With the argument `instructions=off` the first number is 0: QEMU
 * runs faster.
 *
 * Documentation: QEMU 7.2, "TCG Plugins", API version 1. One iteration of a repeated string
 * instruction counts as one, as in QEMU's own counter (-icount).
 */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

/* The part of QEMU's interface that is used. */
struct qemu_plugin_tb;
struct qemu_plugin_insn;
enum { CB_NO_REGS = 0, INLINE_ADD_U64 = 0 };
extern void qemu_plugin_register_vcpu_tb_trans_cb(uint64_t id, void (*cb)(uint64_t, struct qemu_plugin_tb *));
extern size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *tb);
extern struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *tb, size_t index);
extern const void *qemu_plugin_insn_data(const struct qemu_plugin_insn *insn);
extern size_t qemu_plugin_insn_size(const struct qemu_plugin_insn *insn);
extern void qemu_plugin_register_vcpu_insn_exec_cb(struct qemu_plugin_insn *insn, void (*cb)(unsigned, void *),
						   int flags, void *data);
extern void qemu_plugin_register_vcpu_insn_exec_inline(struct qemu_plugin_insn *insn, int op, void *to, uint64_t add);

__attribute__((visibility("default"))) int qemu_plugin_version = 1;

static const uint8_t VMRUN[] = { 0x0f, 0x01, 0xd8 };
static const uint8_t NOPL[] = { 0x0f, 0x1f, 0x84, 0x00 };
#define MARK 0x50617200u

static uint64_t instructions, entries;
static FILE *to;
static int count_instructions = 1;

static void marked(unsigned cpu, void *number)
{
	(void)cpu;
	fprintf(to, "%u %llu %llu\n", (unsigned)(uintptr_t)number, (unsigned long long)instructions,
		(unsigned long long)entries);
	fflush(to);
}

static void translated(uint64_t id, struct qemu_plugin_tb *tb)
{
	size_t count = qemu_plugin_tb_n_insns(tb);
	(void)id;
	for (size_t index = 0; index < count; index++) {
		struct qemu_plugin_insn *insn = qemu_plugin_tb_get_insn(tb, index);
		const uint8_t *bytes = qemu_plugin_insn_data(insn);
		size_t size = qemu_plugin_insn_size(insn);
		uint32_t mark;

		if (count_instructions)
			qemu_plugin_register_vcpu_insn_exec_inline(insn, INLINE_ADD_U64, &instructions, 1);
		if (size == sizeof(VMRUN) && !memcmp(bytes, VMRUN, size))
			qemu_plugin_register_vcpu_insn_exec_inline(insn, INLINE_ADD_U64, &entries, 1);
		if (size == sizeof(NOPL) + sizeof(mark) && !memcmp(bytes, NOPL, sizeof(NOPL))) {
			memcpy(&mark, bytes + sizeof(NOPL), sizeof(mark));
			if ((mark & ~0xffu) == MARK)
				qemu_plugin_register_vcpu_insn_exec_cb(insn, marked, CB_NO_REGS,
								       (void *)(uintptr_t)(mark & 0xff));
		}
	}
}

__attribute__((visibility("default"))) int qemu_plugin_install(uint64_t id, const void *info, int count, char **arguments)
{
	(void)info;
	for (int index = 0; index < count; index++)
		if (!strncmp(arguments[index], "to=", 3))
			to = fopen(arguments[index] + 3, "w");
		else if (!strcmp(arguments[index], "instructions=off"))
			count_instructions = 0;
	if (!to)
		return -1;
	qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
	return 0;
}
