# A boot sector that proves the BIOS can read the disk: reads one sector with the extended read
# of int 13h and sends the text in it to the first serial port.
	.code16
	.globl	_start
_start:
	cli
	xorw	%ax, %ax
	movw	%ax, %ds
	movw	%ax, %es
	movw	%ax, %ss
	movw	$0x7c00, %sp
	sti
	movw	$packet, %si		# the boot drive is in %dl already
	movb	$0x42, %ah
	int	$0x13
	movw	$failed, %si
	jc	print
	movw	$0x7e00, %si
print:
	cli				# the BIOS's timer writes to the port too
	lodsb
	testb	%al, %al
	jz	halt
	movb	%al, %bl
wait:
	movw	$0x3fd, %dx		# line status: transmitter empty?
	inb	%dx, %al
	testb	$0x20, %al
	jz	wait
	movw	$0x3f8, %dx
	movb	%bl, %al
	outb	%al, %dx
	jmp	print
halt:
	sti
	hlt
	jmp	halt

packet:					# one sector from block 1 to 0000:7e00
	.byte	16, 0
	.word	1, 0x7e00, 0
	.quad	1
failed:
	.asciz	"FATHOM-BIOS cannot read the disk\r\n"
