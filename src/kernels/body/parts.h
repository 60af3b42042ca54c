// What an implementation's translation units have of each other; included in its namespace. How
// packed heads are read (PartKernels), by name: of codes, for parts whose heads have their own
// metadata, of row codecs, and of sorted keys.

extern const PartKernels code_kernels[24];
extern const PartKernels row_kernels[5];
extern const PartKernels sorted_kernels[1];
