// ptx.h: the PTX instructions that the trainers use, for emulate.h: of asm("a.b %0, %1;" ...)
// prepare.py makes a_b(x, y), the operands in the order written.
#ifndef SEQ_DEV_PTX_H
#define SEQ_DEV_PTX_H

// ex2_approx_ftz_f32: y = 2^x, numbers too small for a normal float taken as 0.
static void ex2_approx_ftz_f32(float &y, float x)
{
    const float least = 1.17549435e-38f;
    y = exp2f(fabsf(x) < least ? 0 : x);
    y = fabsf(y) < least ? 0 : y;
}

// tanh_approx_f32: y = tanh(x), with 12 bits: the unit is off by up to 2^-11.
static void tanh_approx_f32(float &y, float x)
{
    const float t = tanhf(x), bits = ldexpf(1, 12);
    y = isnan(t) ? t : roundf(t * bits) / bits;
}

// rcp_approx_ftz_f32: y = 1 / x, the same.
static void rcp_approx_ftz_f32(float &y, float x)
{
    const float least = 1.17549435e-38f;
    y = 1 / (fabsf(x) < least ? 0 * x : x);
    y = fabsf(y) < least ? 0 : y;
}

// emu_bf16: the low or high half of a register as a number.
static inline float emu_bf16(uint32_t pair, int high)
{
    const uint32_t bits = high ? pair & 0xffff0000u : pair << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// emu_mma: d (16x8) = a (16x16) b (16x8) + c. Lane 4 g + t holds: of a, the pairs at column 2 t and
// 2 t + 8 of rows g and g + 8 (in the order (g, 2t), (g+8, 2t), (g, 2t+8), (g+8, 2t+8)); of b, rows
// 2 t, 2 t + 1 and these + 8 of column g; of c and d, columns 2 t, 2 t + 1 of rows g and g + 8.
static void emu_mma(EmuLane *lanes)
{
    float a[16][16], b[16][8];
    for (int l = 0; l < EMU_WARP; l++)
        for (int i = 0; i < 8; i++) {
            const int g = l / 4, k = l % 4 * 2 + i / 4 * 8 + i % 2;
            a[g + i / 2 % 2 * 8][k] = emu_bf16(lanes[l].a[i / 2], i % 2);
            if (i / 2 % 2 == 0)
                b[k][g] = emu_bf16(lanes[l].b[i / 4], i % 2);
        }
    for (int l = 0; l < EMU_WARP; l++)
        for (int i = 0; i < 4; i++) {
            const int row = l / 4 + i / 2 * 8, column = l % 4 * 2 + i % 2;
            float sum = lanes[l].c[i];
            for (int k = 0; k < 16; k++)
                sum += a[row][k] * b[k][column];
            *lanes[l].d[i] = sum;
        }
}

// mma: see emu_mma.
static void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(
    float &d0, float &d1, float &d2, float &d3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
    uint32_t b0, uint32_t b1, float c0, float c1, float c2, float c3)
{
    const EmuLane given = {.a = {a0, a1, a2, a3}, .b = {b0, b1}, .c = {c0, c1, c2, c3},
                           .d = {&d0, &d1, &d2, &d3}};
    *emu_lane() = given;
    emu_together("mma", ~0u, emu_mma);
}

// __cvta_generic_to_shared: p as an offset into the dynamic shared memory.
static size_t __cvta_generic_to_shared(const void *p)
{
    return (size_t)((const char *)p - emu_block.dynamic);
}

// emu_shared: back from the offset; dies unless `bytes` bytes are there, aligned to as many.
static char *emu_shared(uint32_t at, size_t bytes)
{
    if (at + bytes > emu_block.dynamic_bytes)
        emu_die("ldmatrix or cp.async outside of the dynamic shared memory");
    if (at % bytes)
        emu_die("ldmatrix or cp.async of a misaligned address");
    return emu_block.dynamic + at;
}

// emu_load: register m of lane l = two elements of matrix m, whose eight rows are where lanes 8 m
// to 8 m + 7 point: elements 2 (l % 4) and the next of row l / 4; TRANS: of column l / 4.
template <int TRANS> static void emu_load(EmuLane *lanes)
{
    for (int l = 0; l < EMU_WARP; l++)
        for (int m = 0; m < 4; m++) {
            const int k = l % 4 * 2;
            const EmuLane *rows = lanes + 8 * m;
            const uint32_t low = TRANS ? rows[k].row[l / 4] : rows[l / 4].row[k];
            const uint32_t high = TRANS ? rows[k + 1].row[l / 4] : rows[l / 4].row[k + 1];
            lanes[l].r[m] = low | high << 16;
        }
}

// ldmatrix: four 8x8 matrices of 16-bit elements; see emu_load.
static void ldmatrix_sync_aligned_m8n8_x4_shared_b16(uint32_t &r0, uint32_t &r1, uint32_t &r2,
                                                     uint32_t &r3, uint32_t at)
{
    EmuLane *lane = emu_lane();
    lane->row = (const uint16_t *)emu_shared(at, 16);
    emu_together("ldmatrix", ~0u, emu_load<0>);
    r0 = lane->r[0], r1 = lane->r[1], r2 = lane->r[2], r3 = lane->r[3];
}
static void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(uint32_t &r0, uint32_t &r1, uint32_t &r2,
                                                           uint32_t &r3, uint32_t at)
{
    EmuLane *lane = emu_lane();
    lane->row = (const uint16_t *)emu_shared(at, 16);
    emu_together("ldmatrix.trans", ~0u, emu_load<1>);
    r0 = lane->r[0], r1 = lane->r[1], r2 = lane->r[2], r3 = lane->r[3];
}

// movmatrix: y = the transpose of an 8x8 matrix, of whose row l / 4 lane l has elements 2 (l % 4)
// and the next.
static void movmatrix_sync_aligned_m8n8_trans_b16(uint32_t &y, uint32_t x)
{
    EmuLane *lane = emu_lane();
    lane->word = x;
    emu_together("movmatrix", ~0u, [](EmuLane *lanes) {
        for (int l = 0; l < EMU_WARP; l++) {
            const int from = l % 4 * 8 + l / 8, shift = l / 4 % 2 * 16; // of rows 2 (l % 4), + 1
            lanes[l].r[0] = (uint32_t)(lanes[from].word >> shift & 0xffff) |
                            (uint32_t)(lanes[from + 4].word >> shift & 0xffff) << 16;
        }
    });
    y = lane->r[0];
}

// st_global: two to sixteen bytes, as one aligned access.
static void st_global_b16(void *p, uint16_t x)
{
    *(uint16_t *)p = x;
}
static void st_global_b32(void *p, uint32_t x)
{
    *(uint32_t *)p = x;
}
static void st_global_v2_b32(void *p, uint32_t x, uint32_t y)
{
    *(uint2 *)p = make_uint2(x, y);
}
static void st_global_v4_b32(void *p, uint32_t x, uint32_t y, uint32_t z, uint32_t w)
{
    *(uint4 *)p = make_uint4(x, y, z, w);
}

// cp_async_ca_shared_global: start copying the first `given` of `bytes` bytes, zeros for the rest.
static void cp_async_ca_shared_global(uint32_t at, const void *from, int bytes, int given)
{
    char *to = emu_shared(at, (size_t)bytes);
    if ((size_t)from % (size_t)bytes)
        emu_die("cp.async from a misaligned address");
    memset(to, EMU_POISON, (size_t)bytes);
    emu_threads[emu_current].copies.push_back({to, from, (size_t)given});
    emu_threads[emu_current].copies.push_back({to + given, NULL, (size_t)(bytes - given)});
}

// cp_async_cg_shared_global: the same; the GPU's first-level cache does not keep it.
static void cp_async_cg_shared_global(uint32_t at, const void *from, int bytes, int given)
{
    cp_async_ca_shared_global(at, from, bytes, given);
}

// emu_arrive: the first `count` of the copies that this thread waits for arrive.
static void emu_arrive(size_t count)
{
    std::vector<EmuCopy> &copies = emu_threads[emu_current].copies;
    for (size_t i = 0; i < count; i++) {
        const EmuCopy &c = copies[i];
        c.from ? memcpy(c.to, c.from, c.bytes) : memset(c.to, 0, c.bytes);
    }
    copies.erase(copies.begin(), copies.begin() + (ptrdiff_t)count);
}

// cp_async_wait_all: all that this thread copies arrives.
static void cp_async_wait_all(void)
{
    emu_arrive(emu_threads[emu_current].copies.size());
    emu_threads[emu_current].groups.clear();
}

// cp_async_commit_group: the copies since the last call are a group.
static void cp_async_commit_group(void)
{
    EmuThread *t = &emu_threads[emu_current];
    size_t grouped = 0;
    for (size_t n : t->groups)
        grouped += n;
    t->groups.push_back(t->copies.size() - grouped);
}

// cp_async_wait_group: all groups but the latest `pending` arrive.
static void cp_async_wait_group(size_t pending)
{
    std::vector<size_t> &groups = emu_threads[emu_current].groups;
    while (groups.size() > pending) {
        emu_arrive(groups.front());
        groups.erase(groups.begin());
    }
}

#endif
