// SPDX-License-Identifier: GPL-2.0-only
/*
 * A page of memory that user mode maps, and that a device writes.
 *
 *	/dev/check_device, while the virtio source of random numbers has no other driver:
 *	mmap	maps the page, with any rights
 *	write	fills as many bytes of it, from the file's offset on, with random numbers, by the
 *		device alone
 */
#include <linux/completion.h>
#include <linux/fs.h>
#include <linux/io.h>
#include <linux/miscdevice.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/scatterlist.h>
#include <linux/virtio.h>
#include <linux/virtio_config.h>
#include <linux/virtio_ids.h>

static struct virtqueue *queue;
static struct page *page;
static DECLARE_COMPLETION(filled);

static void on_filled(struct virtqueue *which)
{
	unsigned int length;

	while (virtqueue_get_buf(which, &length))
		complete(&filled);
}

static int check_mmap(struct file *file, struct vm_area_struct *area)
{
	if (area->vm_end - area->vm_start != PAGE_SIZE || area->vm_pgoff)
		return -EINVAL;
	return remap_pfn_range(area, area->vm_start, page_to_pfn(page), PAGE_SIZE, area->vm_page_prot);
}

static ssize_t check_write(struct file *file, const char __user *from, size_t count, loff_t *at)
{
	struct scatterlist part;
	int error;

	if (!queue)
		return -ENODEV;
	if (!count || *at < 0 || *at >= PAGE_SIZE || count > PAGE_SIZE - *at)
		return -EINVAL;
	sg_init_table(&part, 1);
	sg_set_page(&part, page, count, *at);
	reinit_completion(&filled);
	error = virtqueue_add_inbuf(queue, &part, 1, page, GFP_KERNEL);
	if (error)
		return error;
	virtqueue_kick(queue);
	wait_for_completion(&filled);
	return count;
}

static const struct file_operations operations = {
	.owner = THIS_MODULE,
	.mmap = check_mmap,
	.write = check_write,
};

static struct miscdevice node = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "check_device",
	.fops = &operations,
};

static int check_probe(struct virtio_device *device)
{
	struct virtqueue *found = virtio_find_single_vq(device, on_filled, "check");

	if (IS_ERR(found))
		return PTR_ERR(found);
	virtio_device_ready(device);
	queue = found;
	return 0;
}

static void check_remove(struct virtio_device *device)
{
	queue = NULL;
	virtio_reset_device(device);
	device->config->del_vqs(device);
}

static const struct virtio_device_id ids[] = { { VIRTIO_ID_RNG, VIRTIO_DEV_ANY_ID }, { 0 } };

static struct virtio_driver driver = {
	.driver.name = "check_device",
	.driver.owner = THIS_MODULE,
	.id_table = ids,
	.probe = check_probe,
	.remove = check_remove,
};

static int __init check_device_init(void)
{
	int error;

	page = alloc_page(GFP_KERNEL | __GFP_ZERO);
	if (!page)
		return -ENOMEM;
	error = register_virtio_driver(&driver);
	if (!error)
		error = misc_register(&node);
	return error;
}

module_init(check_device_init);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("A page that a device writes and programs execute");
