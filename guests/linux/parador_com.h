/* SPDX-License-Identifier: GPL-2.0-only WITH Linux-syscall-note */
/*
 * /dev/parador-com*: a channel to another virtual machine on Parador, as programs use it.
 *
 * read and write carry one message each: its payload, 0 to 56 bytes. mmap from offset 0 maps the
 * channel's free area, from PARADOR_COM_SHARE(n) a share of the peer. An access to a share that
 * is gone because the peer has revoked it back or the driver has let go of the device, is SIGBUS.
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

/*
 * Shares: memory of the program's own that the peer may map, until this file is closed or it is
 * revoked.
 */
#define PARADOR_COM_SHARES 4
#define PARADOR_COM_SHARE_BYTES 0x40000
/* Offset for mmap. */
#define PARADOR_COM_SHARE(share) (0x40000000UL + (unsigned long)(share) * PARADOR_COM_SHARE_BYTES)

#define PARADOR_COM_WRITABLE 1	/* the peer may also write */

struct parador_com_offer {
	__u32 share;		/* number, below PARADOR_COM_SHARES */
	__u32 flags;		/* 0 or PARADOR_COM_WRITABLE */
	/* of memory that may be written, in whole pages, in one piece of RAM */
	__u64 address;
	__u64 length;		/* at most PARADOR_COM_SHARE_BYTES */
};

enum parador_com_state {
	PARADOR_COM_NONE,
	PARADOR_COM_OFFERED,
	PARADOR_COM_MAPPED,	/* by the other side */
};

struct parador_com_share {
	__u32 state;
	__u32 flags;
	__u64 length;		/* 0: there is none */
};

struct parador_com_list {
	struct parador_com_share own[PARADOR_COM_SHARES];
	struct parador_com_share peers[PARADOR_COM_SHARES];
};

#define PARADOR_COM_INFO _IOR('P', 0xc0, struct parador_com_info)
/* Like write and read, with the tag; they wait or do not wait like those. */
#define PARADOR_COM_SEND _IOW('P', 0xc1, struct parador_com_message)
#define PARADOR_COM_RECEIVE _IOR('P', 0xc2, struct parador_com_message)
#define PARADOR_COM_OFFER _IOW('P', 0xc3, struct parador_com_offer)
/* Takes back what this file has offered: its number. */
#define PARADOR_COM_REVOKE _IOW('P', 0xc4, __u32)
/*
 * All shares. POLLPRI of poll: the peer has changed something in it, was started or has ended,
 * since this file looked.
 */
#define PARADOR_COM_LIST _IOR('P', 0xc5, struct parador_com_list)

#endif
