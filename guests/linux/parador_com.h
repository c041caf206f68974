/* SPDX-License-Identifier: GPL-2.0-only WITH Linux-syscall-note */
/*
 * /dev/parador-com*: a channel to another virtual machine on Parador, as programs use it.
 *
 * read and write carry one message each: its payload, 0 to 56 bytes. mmap from offset 0 maps the channel's free area.
 */
#ifndef PARADOR_COM_H
#define PARADOR_COM_H

#include <linux/ioctl.h>
#include <linux/types.h>

#define PARADOR_COM_PAYLOAD 56
#define PARADOR_COM_NAME 32

/* A message with its tag. */
struct parador_com_message {
	__u32 length;
	__u32 tag;
	__u8 payload[PARADOR_COM_PAYLOAD];
};

struct parador_com_info {
	__u32 own_id;		/* number of this machine among all */
	__u32 peer_id;
	__u32 side;		/* 0 or 1 */
	__u32 peer_runs;	/* 0 or 1 */
	__u32 has_doorbell;	/* 0: who waits looks every 10 ms */
	__u32 reserved;
	__u64 area;		/* bytes that mmap maps */
	char own_name[PARADOR_COM_NAME];	/* filled up with zeros, not always ended by one */
	char peer_name[PARADOR_COM_NAME];
};

#define PARADOR_COM_INFO _IOR('P', 0xc0, struct parador_com_info)
/* Like write and read, with the tag; they wait or do not wait like those. */
#define PARADOR_COM_SEND _IOW('P', 0xc1, struct parador_com_message)
#define PARADOR_COM_RECEIVE _IOR('P', 0xc2, struct parador_com_message)

#endif
