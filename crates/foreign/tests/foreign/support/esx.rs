//! Creates ESX extents, which qemu-img cannot create.

/// Writes fields of `N` bytes at their offsets.
fn put<const N: usize>(bytes: &mut [u8], fields: &[(usize, [u8; N])]) {
    for (at, field) in fields {
        bytes[*at..at + N].copy_from_slice(field);
    }
}

fn is_zero(grain: &[u8]) -> bool {
    grain.iter().all(|byte| *byte == 0)
}

/// Creates a COWD extent with the contents `raw`, in grains of 8 sectors.
pub fn cowd(raw: &[u8]) -> Vec<u8> {
    const GRAIN: usize = 4096;
    let tables = raw.len().div_ceil(4096 * GRAIN);
    let mut extent = vec![0; 4 * 512 + 512 + tables * 16384];
    let fields = [
        (4, 1),
        (8, 3),
        (12, raw.len() as u32 / 512),
        (16, GRAIN as u32 / 512),
        (20, 4),
        (24, tables as u32),
    ];
    put(
        &mut extent,
        &fields.map(|(at, field)| (at, field.to_le_bytes())),
    );
    extent[..4].copy_from_slice(b"COWD");
    for (table, data) in raw.chunks(4096 * GRAIN).enumerate() {
        if is_zero(data) {
            continue;
        }
        let at = 5 * 512 + table * 16384;
        put(
            &mut extent,
            &[(2048 + table * 4, (at as u32 / 512).to_le_bytes())],
        );
        for (index, grain) in data.chunks(GRAIN).enumerate() {
            if !is_zero(grain) {
                let sector = extent.len() as u32 / 512;
                put(&mut extent, &[(at + index * 4, sector.to_le_bytes())]);
                extent.extend(grain);
                extent.resize(extent.len().next_multiple_of(512), 0);
            }
        }
    }
    extent
}

/// Creates a seSparse extent with the contents `raw`.
///
/// Grains of zeroes are alternately absent, unmapped and zeroed.
pub fn sesparse(raw: &[u8]) -> Vec<u8> {
    const GRAIN: usize = 4096;
    const TABLE: usize = 64 * 512;
    const TABLES_AT: usize = 64 * 512;
    let count = raw.len().div_ceil(4096 * GRAIN);
    let grains_at = TABLES_AT + count * TABLE;
    let mut extent = vec![0; grains_at];
    let fields = [
        (0, 0xcafe_babe),
        (8, 0x2_0000_0001),
        (16, raw.len() as u64 / 512),
        (24, 8),
        (32, 64),
        (80, 1),
        (88, 1),
        (128, 8),
        (136, 1),
        (144, TABLES_AT as u64 / 512),
        (152, (count * 64) as u64),
        (192, grains_at as u64 / 512),
        (512, 0xcafe_cafe),
    ];
    put(
        &mut extent,
        &fields.map(|(at, field)| (at, field.to_le_bytes())),
    );
    let (mut used, mut zeroes) = (0_u64, 0);
    for (index, data) in raw.chunks(4096 * GRAIN).enumerate() {
        if is_zero(data) {
            continue;
        }
        // The tables are stored in reverse order.
        let table = count - 1 - index;
        let entry = 0x1000_0000_0000_0000 | table as u64;
        put(&mut extent, &[(8 * 512 + index * 8, entry.to_le_bytes())]);
        for (index, grain) in data.chunks(GRAIN).enumerate() {
            let entry = if is_zero(grain) {
                zeroes += 1;
                [0, 1 << 60, 2 << 60, (1 << 60) + 77][zeroes % 4]
            } else {
                extent.extend(grain);
                extent.resize(extent.len().next_multiple_of(GRAIN), 0);
                used += 1;
                (3 << 60) | ((used - 1) & 0xfff) << 48 | (used - 1) >> 12
            };
            let at = TABLES_AT + table * TABLE + index * 8;
            put(&mut extent, &[(at, entry.to_le_bytes())]);
        }
    }
    extent
}
