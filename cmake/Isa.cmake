# Instruction sets, their flags, and tf_add_kernel().

# No -march=native (the binary must run elsewhere) and no -ffast-math (NaN and inf have meaning).
set(TF_COMMON_FLAGS -Wall -Wextra -fno-math-errno
                    "-ffile-prefix-map=${CMAKE_CURRENT_SOURCE_DIR}/=")

if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # GCC's own AVX-512 header passes an undefined vector on purpose, and GCC warns of it, as of a row that
  # is filled before it is read.
  list(APPEND TF_COMMON_FLAGS -Wno-uninitialized -Wno-maybe-uninitialized)
endif()

set(_avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c -mprefer-vector-width=512)
set(_avx512_vnni ${_avx512} -mavx512vnni)
# The table of csrc/cpu/core/isa.h: sets in ascending order of preference, and the set that each one
# extends.
set(TF_ALL_ISAS baseline avx2 avx_vnni avx512 avx512_vnni avx512_bf16 amx)
set(_other_isas neon neon_dot neon_i8mm)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
  set(_swap ${TF_ALL_ISAS})
  set(TF_ALL_ISAS ${_other_isas})
  set(_other_isas ${_swap})
endif()
if(NOT TF_ISAS)
  set(TF_ISAS ${TF_ALL_ISAS})
endif()
set(TF_EXTENDS_baseline "")
set(TF_EXTENDS_avx2 baseline)
set(TF_EXTENDS_avx_vnni avx2)
set(TF_EXTENDS_avx512 avx2)
set(TF_EXTENDS_avx512_vnni avx512)
set(TF_EXTENDS_avx512_bf16 avx512_vnni)
set(TF_EXTENDS_amx avx512_bf16)
set(TF_EXTENDS_neon "")
set(TF_EXTENDS_neon_dot neon)
set(TF_EXTENDS_neon_i8mm neon_dot)
# ARMv8.0: its vectors are part of every 64-bit ARM.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # GCC schedules before it allocates registers on ARM, not on x86, and then spills register tiles.
  set(TF_FLAGS_neon -fno-schedule-insns)
else()
  set(TF_FLAGS_neon -ffp-contract=fast)  # GCC's default, on which equal bits of kernels rely
endif()
set(TF_FLAGS_neon_dot ${TF_FLAGS_neon} -march=armv8.2-a+dotprod)
set(TF_FLAGS_neon_i8mm ${TF_FLAGS_neon} -march=armv8.2-a+dotprod+i8mm)
set(TF_FLAGS_baseline "")
set(TF_FLAGS_avx2 -mavx2 -mfma -mf16c)
set(TF_FLAGS_avx_vnni ${TF_FLAGS_avx2} -mavxvnni)
set(TF_FLAGS_avx512 ${_avx512})
set(TF_FLAGS_avx512_vnni ${_avx512_vnni})
set(TF_FLAGS_avx512_bf16 ${_avx512_vnni} -mavx512bf16)
set(TF_FLAGS_amx ${_avx512_vnni} -mavx512bf16 -mamx-tile -mamx-bf16 -mamx-int8)
if(TF_EMULATE_AMX)
  set(TF_FLAGS_amx ${_avx512_vnni} -mavx512bf16 -DTF_EMULATED_TILES=1)
  add_compile_definitions(TF_EMULATE_AMX=1)
endif()

# An old compiler may lack the newest sets: kernels then go without those builds.
set(TF_ISA_DEFINITIONS "")
foreach(isa ${_other_isas})
  string(TOUPPER ${isa} upper)
  list(APPEND TF_ISA_DEFINITIONS TF_HAVE_${upper}=0)
endforeach()
foreach(isa ${TF_ALL_ISAS})
  set(have 0)
  string(REPLACE ";" " " flags "${TF_FLAGS_${isa}}")
  check_cxx_compiler_flag("${flags}" TF_COMPILER_HAS_${isa})
  if(NOT TF_COMPILER_HAS_${isa})
    list(REMOVE_ITEM TF_ISAS ${isa})
  elseif(isa IN_LIST TF_ISAS)
    set(have 1)
  endif()
  string(TOUPPER ${isa} upper)
  list(APPEND TF_ISA_DEFINITIONS TF_HAVE_${upper}=${have})
endforeach()

set(TF_KERNEL_OBJECTS "")

# What the macros of csrc/cpu/core/isa.h declare a kernel for.
set(TF_KERNEL baseline avx2 avx512 neon)
set(TF_KERNEL_AMX ${TF_KERNEL} avx512_bf16 amx)
set(TF_KERNEL_UNITS avx512_bf16 amx)
set(TF_KERNEL_INT8 ${TF_KERNEL_AMX} avx_vnni avx512_vnni neon_dot neon_i8mm)
set(TF_KERNEL_BF16X3 amx)

# tf_add_kernel(<path> <macro>...): builds csrc/cpu/<path>_kernel.cpp, into namespace tf::<isa>. Of the
# sets of each macro it takes, for each of TF_ISAS, that set or the nearest one that it extends.
function(tf_add_kernel path)
  get_filename_component(name ${path} NAME)
  set(wanted "")
  foreach(macro ${ARGN})
    foreach(isa ${TF_ISAS})
      while(isa AND NOT isa IN_LIST ${macro})
        set(isa "${TF_EXTENDS_${isa}}")
      endwhile()
      list(APPEND wanted ${isa})
    endforeach()
  endforeach()
  list(REMOVE_DUPLICATES wanted)
  foreach(isa ${wanted})
    set(target ${name}_${isa})
    add_library(${target} OBJECT csrc/cpu/${path}_kernel.cpp)
    target_include_directories(${target} PRIVATE csrc)
    target_compile_definitions(${target} PRIVATE TF_ISA=${isa} ${TF_ISA_DEFINITIONS})
    target_compile_options(${target} PRIVATE ${TF_COMMON_FLAGS} ${TF_FLAGS_${isa}})
    list(APPEND TF_KERNEL_OBJECTS $<TARGET_OBJECTS:${target}>)
  endforeach()
  set(TF_KERNEL_OBJECTS ${TF_KERNEL_OBJECTS} PARENT_SCOPE)
endfunction()

# For build_info(): "baseline:;avx2:-mavx2 ..." as C++ initialisers.
set(TF_ISA_FLAG_TABLE "")
foreach(isa ${TF_ISAS})
  string(REPLACE ";" " " flags "${TF_FLAGS_${isa}}")
  string(APPEND TF_ISA_FLAG_TABLE "{\"${isa}\", \"${flags}\"}, ")
endforeach()
